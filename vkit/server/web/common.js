"use strict";
// What both pages need: elements, addresses, the key, the theme, and reading replies. Text from outside only ever
// becomes text nodes.

const byId = (id) => document.getElementById(id);

/** A new element. Names with a dash, `role` and `for` are attributes, the rest are properties. */
function make(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.includes("-") || name === "role" || name === "for") made.setAttribute(name, value);
    else made[name] = value;
  }
  made.append(...children);
  return made;
}

/** Where the server's paths begin: this page's own place, whatever a proxy put in front of it. */
const HOME = new URL(location.pathname.replace(/\/docs\/*$/, "").replace(/\/*$/, "/"), location.origin);
const address = (path) => new URL(path.replace(/^\/+/, ""), HOME).href;

/** A value kept by the browser; a browser that keeps nothing is no reason to fail. */
function recall(area, name) {
  try { return window[area].getItem(name); } catch { return null; }
}
function remember(area, name, value) {
  try { value ? window[area].setItem(name, value) : window[area].removeItem(name); } catch { /* nothing is kept */ }
}

const KEY = "vkit.key";
const currentKey = () => byId("key").value.trim();
function keyHeaders() {
  const key = currentKey();
  return key ? { Authorization: `Bearer ${key}` } : {};
}
function setUpKey(changed) {
  const field = byId("key");
  field.value = recall("sessionStorage", KEY) || "";
  field.addEventListener("change", () => { remember("sessionStorage", KEY, currentKey()); changed(); });
}

const THEMES = ["auto", "light", "dark"];
function setUpTheme() {
  const button = byId("theme");
  const show = (theme) => {
    if (theme === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = theme;
    for (const icon of button.querySelectorAll("[data-for]")) icon.style.display = icon.dataset.for === theme ? "" : "none";
    button.setAttribute("aria-label", `Theme: ${theme}`);
    button.title = `Theme: ${theme}`;
  };
  let theme = THEMES.includes(recall("localStorage", "vkit.theme")) ? recall("localStorage", "vkit.theme") : "auto";
  show(theme);
  button.addEventListener("click", () => {
    theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    remember("localStorage", "vkit.theme", theme === "auto" ? "" : theme);
    show(theme);
  });
}

async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    // Without a secure context there is no clipboard: the old way needs a selected field.
    const field = make("textarea", { value: text, className: "unseen" });
    document.body.append(field);
    field.select();
    button.textContent = document.execCommand("copy") ? "Copied" : "Not copied";
    field.remove();
    button.focus();
  }
  setTimeout(() => { button.textContent = label; }, 1200);
}

/** The payloads of a stream of server-sent events; `heard` gets every piece of text as it arrives. */
async function* serverSentEvents(body, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    heard(value);
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines.map((text) => text.replace(/\r$/, ""))) {
      if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
      else if (line === "" && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}

/** What an error reply says: a title, a message and the field it names. */
function refusalOf(status, text) {
  try {
    const error = JSON.parse(text).error;
    return { title: `${status} ${error.type}`, message: error.message, field: error.param || null };
  } catch {
    return { title: String(status), message: text || "(no text)", field: null };
  }
}

/** JSON with indentation, or the text itself if it is none. */
function pretty(text) {
  try { return JSON.stringify(JSON.parse(text), null, 2); } catch { return text; }
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** The curl command of a request. The key stays out of it: it comes from a variable. */
function curlOf(method, url, body, { hasKey = false, streams = false } = {}) {
  const parts = [`curl ${streams ? "-N " : ""}${method === "GET" ? "" : `-X ${method} `}${quoted(url)}`];
  if (hasKey) parts.push(`-H "Authorization: Bearer $VKIT_API_KEY"`);
  if (body !== null) parts.push("-H 'Content-Type: application/json'", `-d ${quoted(body)}`);
  return parts.join(" \\\n  ");
}
