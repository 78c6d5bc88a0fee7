// The frame of the page: the views, the color theme, the API key, and the list of models.

import { ApiError, ask, setKey } from "./api.js";
import { Clarify } from "./clarify.js";
import { Compare } from "./compare.js";
import { byId, complain, entitle, h } from "./dom.js";
import { Grafts } from "./grafts.js";
import { Summarize } from "./summarize.js";

const VIEWS = ["compare", "clarify", "summarize", "grafts"];
const MOST = { most: "max_tokens", "clarify-most": "max_tokens", "summary-most": "max_tokens", budget: "questions", sentences: "sentences" };
const views = { compare: new Compare(), clarify: new Clarify(), summarize: new Summarize(), grafts: new Grafts() };

function showView() {
  const asked = location.hash.slice(1);
  if (asked && !VIEWS.includes(asked)) return;
  const name = asked || "compare";
  for (const view of VIEWS) byId(`view-${view}`).hidden = view !== name;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${name}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${byId(`${name}-title`).textContent} – GraftLM`;
  views[name].shown?.();
}

function chooseTheme() {
  const root = document.documentElement;
  for (const choice of document.querySelectorAll("input[name=theme]")) {
    choice.checked = choice.value === (root.dataset.theme ?? "auto");
    choice.addEventListener("change", () => {
      if (choice.value === "auto") delete root.dataset.theme;
      else root.dataset.theme = choice.value;
      try {
        localStorage.setItem("graftlm.theme", choice.value);
      } catch {
        // it holds until the page is closed
      }
    });
  }
}

function askForKey(event) {
  byId("key").hidden = false;
  byId("key-note").textContent = `${event.detail} It is kept in this tab until the tab is closed.`;
  byId("key-field").focus();
}

function useKey(event) {
  event.preventDefault();
  setKey(byId("key-field").value.trim());
  byId("key-field").value = "";
  byId("key").hidden = true;
  load();
}

/** Request the list of models, and pass it to every view. */
async function load() {
  complain(byId("boot"));
  try {
    const [models, overview] = await Promise.all([ask("v1/models"), ask("v1/graftlm/grafts")]);
    const served = { names: models.data.map((model) => model.id), backbones: overview.backbones, grafts: overview.data, limits: overview.limits };
    for (const select of document.querySelectorAll("select.models")) offerModels(select, served);
    for (const [id, limit] of Object.entries(MOST)) limitField(byId(id), served.limits[limit]);
    for (const view of Object.values(views)) view.serve(served);
    entitle();
    document.documentElement.dataset.ready = "yes";
  } catch (error) {
    if (error.status === 401) return;
    if (!(error instanceof ApiError)) throw error;
    complain(byId("boot"), error.message);
  }
}

function offerModels(select, served) {
  const chosen = select.value;
  const none = select.dataset.none ? [h("option", { value: "" }, select.dataset.none)] : [];
  select.replaceChildren(...none, ...served.names.map((name) => h("option", { value: name }, name)));
  if ([...select.options].some((option) => option.value === chosen)) select.value = chosen;
}

/** Apply the server's limit to a field. */
function limitField(field, most) {
  field.max = most;
  if (Number(field.value) > most) field.value = most;
}

chooseTheme();
addEventListener("change", entitle);
document.addEventListener("graftlm:key", askForKey);
byId("key").addEventListener("submit", useKey);
addEventListener("hashchange", showView);
showView();
load();
