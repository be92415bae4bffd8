// Reads the console's JSON. The page asks for a token only if a token is needed, and forgets it with the tab.

let asking = null;

function login() {
  asking ??= new Promise((resolve) => {
    const dialog = document.getElementById("login");
    const field = document.getElementById("token");
    field.value = "";
    dialog.addEventListener("close", () => {
      sessionStorage.setItem("token", field.value);
      asking = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return asking;
}

export async function read(name, parameters = {}) {
  for (;;) {
    const token = sessionStorage.getItem("token");
    const headers = token ? { authorization: `Bearer ${token}` } : {};
    const answer = await fetch(`api/${name}?${new URLSearchParams(parameters)}`, { headers });
    if (answer.ok) return answer.json();
    if (answer.status !== 401) {
      throw Object.assign(new Error((await answer.json()).message), { status: answer.status });
    }
    await login();
  }
}

// All pages of a listing, one after the other.
export async function* pages(name, parameters) {
  for (let page = ""; ;) {
    const found = await read(name, { ...parameters, page });
    yield found;
    if (!found.next) return;
    page = found.next;
  }
}

// Parts of protobuf's JSON: an enum's name without its prefix, bytes in hexadecimal, a duration in seconds.
export const word = (name, prefix) => name.slice(prefix.length).toLowerCase().replaceAll("_", " ");
export const hex = (bytes) => Array.from(atob(bytes), (one) => one.charCodeAt(0).toString(16).padStart(2, "0")).join("");
export const durationOf = (text) => (text === undefined ? null : parseFloat(text));

// Helpers that every view uses to write.
export const clock = (time) => time.toLocaleTimeString("en-GB");
export const count = (value) => value.toLocaleString("en");
export const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(1)} %` : "–");

export function seconds(value) {
  if (value === null) return "no end";
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}

export function owner({ tenant, salt }) {
  if (tenant === null && salt === null) return "shared by all";
  return [tenant, salt === null || salt === tenant ? null : `salt ${salt}`].filter((part) => part !== null).join(", ");
}

export const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function element(tag, text = "", attributes = {}) {
  const made = document.createElement(tag);
  made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

export const narrow = matchMedia("(max-width: 40rem)");
// Rows of a table on a narrow page, where each row is a list, until the reader asks for all of them.
const FEW = 6;

// Columns: [title, value of a row, class: "number", "short" for text without line breaks, "name" for long names]. A
// value may be an element.
export function fill(table, columns, rows, nothing) {
  const head = element("tr");
  const cell = (tag, text, kind) => element(tag, text, kind ? { class: kind } : {});
  head.append(...columns.map(([title, , kind]) => cell("th", title, kind)));
  const isCut = narrow.matches && rows.length > FEW && !table.dataset.all;
  const body = (isCut ? rows.slice(0, FEW) : rows).map((row) => {
    const line = element("tr");
    line.append(...columns.map(([title, value, kind]) => {
      const found = value(row);
      const made = cell("td", found instanceof Node ? "" : String(found), kind);
      if (found instanceof Node) made.append(found);
      made.dataset.title = title;
      return made;
    }));
    return line;
  });
  if (!rows.length) {
    const line = element("tr");
    line.append(element("td", nothing, { colspan: columns.length }));
    body.push(line);
  }
  table.replaceChildren(head, ...body);
  showMore(table, isCut ? rows.length : 0, () => fill(table, columns, rows, nothing));
}

// A button below a table that shows only a part of its rows. all: number of rows, 0 if the table shows all rows.
function showMore(table, all, draw) {
  const after = table.nextElementSibling;
  if (!all) {
    after?.remove();
    return;
  }
  const button = after ?? element("button", "", { type: "button", class: "more" });
  button.textContent = `Show all ${count(all)}`;
  button.onclick = () => {
    table.dataset.all = "yes";
    draw();
  };
  if (!after) table.after(button);
}

export function sized(canvas) {
  const ratio = devicePixelRatio || 1;
  const { width, height } = canvas.getBoundingClientRect();
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  return { pen, width, height };
}

// pale: like blocks that are cached and not in use.
export function key(name, text, pale = false) {
  const made = element("span", "", { class: "key" });
  const patch = element("i", "", pale ? { class: "pale" } : {});
  patch.style.background = name.startsWith("--") ? `var(${name})` : name;
  made.append(patch, text);
  return made;
}
