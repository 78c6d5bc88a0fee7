// Requests to the server, with whole or streamed responses. Every failure is an ApiError with one sentence.

import { keep, kept, tab } from "./dom.js";

const BASE = new URL("./", document.baseURI);

export class ApiError extends Error {
  constructor(message, status = 0, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = () => kept(tab, "key") ?? "";
export const setKey = (value) => keep(tab, "key", value || null);

/** Fetch JSON from a path of the server; with a body, as a POST. */
export async function ask(path, body = null, signal = null) {
  const response = await send(path, body, signal);
  try {
    return await response.json();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The response of the server is not JSON.", response.status);
  }
}

/** Yield the events of a streamed response as JSON values. */
export async function* stream(path, body, signal) {
  const response = await send(path, body, signal);
  let whole = false;
  for await (const data of lines(response)) {
    if (data === "[DONE]") {
      whole = true;
      break;
    }
    const value = parsed(data);
    if (value.error) throw errorOf(value, response.status);
    yield value;
  }
  if (!whole) throw new ApiError("The response is incomplete: the server closed the connection early.");
}

async function send(path, body, signal) {
  const headers = { Accept: "application/json" };
  const used = key();
  if (used) headers.Authorization = `Bearer ${used}`;
  if (body !== null) headers["Content-Type"] = "application/json";
  const options = { method: body === null ? "GET" : "POST", headers, signal, cache: "no-store" };
  if (body !== null) options.body = JSON.stringify(body);
  const response = await reached(new URL(path, BASE), options);
  if (response.ok) return response;
  const error = errorOf(await response.json().catch(() => null), response.status);
  // Ask for a key, unless the rejected one has been replaced in the meantime.
  if (response.status === 401 && used === key())
    document.dispatchEvent(new CustomEvent("graftlm:key", { detail: error.message }));
  throw error;
}

async function reached(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server can’t be reached: is it still running?");
  }
}

function errorOf(body, status) {
  const details = body?.error;
  const message = typeof details?.message === "string" ? details.message : `The server answered with the status ${status}.`;
  return new ApiError(message, status, details?.code ?? null);
}

function parsed(data) {
  try {
    return JSON.parse(data) ?? {};
  } catch {
    throw new ApiError("The server sent an event that is not JSON.");
  }
}

/** Yield the data of each event. */
async function* lines(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await read(reader);
      if (done) return;
      const found = (rest + value).split(/\r?\n/);
      rest = found.pop();
      for (const line of found) if (line.startsWith("data:")) yield line.slice(5).trim();
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The response is incomplete: the connection to the server was lost.");
  }
}
