// Runs before the page is drawn, so that it does not flash in the other theme.
{
  let theme = null;
  try {
    theme = localStorage.getItem("graftlm.theme");
  } catch {
    // storage is switched off: the system's preference stands
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
