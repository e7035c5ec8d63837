// Fold the groups of the sidebar, except the first one and that of the current page.
document.querySelectorAll(".sidebar-tree > p.caption").forEach((caption, number) => {
  const pages = caption.nextElementSibling;
  if (!pages || pages.tagName !== "UL") return;
  const group = document.createElement("details");
  const summary = document.createElement("summary");
  group.open = number === 0 || pages.querySelector(".current") !== null;
  caption.before(group);
  summary.append(caption);
  group.append(summary, pages);
});
