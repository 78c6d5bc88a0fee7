// Runs before the page is drawn, so that it does not flash in the other theme.
{
  let theme = null;
  try {
    theme = localStorage.getItem("graftlm.theme");
  } catch {
    // storage is disabled: the system's preference applies
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
