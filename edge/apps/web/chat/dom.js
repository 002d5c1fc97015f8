/** Elements, icons and buttons. */
const COPIED = 1500; // ms for which a button says that it has copied
const SVG = "http://www.w3.org/2000/svg";
const ICONS = {
  camera: "M4 8h4l1.5-3h5L16 8h4v11H4zM12 10a3.5 3.5 0 1 0 0 7a3.5 3.5 0 1 0 0-7",
  copy: "M9 9h10v12H9zM15 9V3H5v12h4",
  done: "M5 13l5 5L20 7",
  microphone: "M12 3a3 3 0 0 0-3 3v5a3 3 0 0 0 6 0V6a3 3 0 0 0-3-3zM5.5 11a6.5 6.5 0 0 0 13 0M12 17.5V21",
  picture: "M4 5h16v14H4zM4 16l5-5 4 4 3-3 4 4M15.5 9.5h.01",
  menu: "M4 7h16M4 12h16M4 17h16",
  remove: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  save: "M12 4v11M7 11l5 5 5-5M5 20h14",
  settings: "M4 7h9M19 7h1M4 17h1M11 17h9M16 4.5v5M8 14.5v5",
  edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  retry: "M20 5v5h-5M19.5 10A8 8 0 1 0 20 14",
  send: "M12 20V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
};

/**
 * @template {keyof HTMLElementTagNameMap} Name
 * @param {Name} name @param {Record<string, any>} [properties] @param {(Node | string)[]} [children]
 * @returns {HTMLElementTagNameMap[Name]}
 */
export function element(name, properties = {}, children = []) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

/** @param {keyof typeof ICONS} name */
export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  const path = document.createElementNS(SVG, "path");
  for (const [key, value] of Object.entries({ viewBox: "0 0 24 24", "aria-hidden": "true", class: `icon ${name}` })) svg.setAttribute(key, value);
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** @param {keyof typeof ICONS} name @param {string} label @param {() => void} onclick */
export function iconButton(name, label, onclick) {
  return element("button", { type: "button", className: `small ${name}`, ariaLabel: label, title: label, onclick }, [icon(name)]);
}

/** @param {string} label @param {() => string} text */
export function copyButton(label, text) {
  const button = iconButton("copy", label, async () => {
    await navigator.clipboard.writeText(text());
    button.ariaLabel = "Copied";
    button.replaceChildren(icon("done"));
    setTimeout(() => ((button.ariaLabel = label), button.replaceChildren(icon("copy"))), COPIED);
  });
  return button;
}
