// Runs before anything is drawn, so that the page never flashes in the other colours.
{
  let theme = null;
  try {
    theme = localStorage.getItem("graftlm.theme");
  } catch {
    // storage is switched off: the system's preference stands
  }
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
}
