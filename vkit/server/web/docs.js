// The explorer: /openapi.json as a list of routes with their shapes, each ready to be called.

const MAX_DEPTH = 8;
/** Bodies to start from, where the required fields alone would not make a useful call. */
const STARTING_BODIES = {
  "/v1/completions": { prompt: "The capital of France is", max_tokens: 16 },
  "/v1/chat/completions": { messages: [{ role: "user", content: "Say hello." }], max_tokens: 32 },
  "/v1/responses": { input: "Say hello.", max_output_tokens: 32 },
  "/v1/messages": { messages: [{ role: "user", content: "Say hello." }], max_tokens: 32 },
  "/v1/messages/count_tokens": { messages: [{ role: "user", content: "Say hello." }] },
  "/tokenize": { prompt: "Say hello." },
  "/detokenize": { tokens: [1, 2, 3] },
  "/inference/v1/generate": { token_ids: [1, 2, 3], sampling_params: { max_tokens: 8 } },
  "/generative_scoring": { query: "Is this a question?", items: [" Yes.", " No."], label_token_ids: [1, 2] },
};
STARTING_BODIES["/v1/completions/render"] = STARTING_BODIES["/v1/completions"];
STARTING_BODIES["/v1/chat/completions/render"] = STARTING_BODIES["/v1/chat/completions"];
STARTING_BODIES["/v1/responses/render"] = STARTING_BODIES["/v1/responses"];
STARTING_BODIES["/v1/messages/render"] = STARTING_BODIES["/v1/messages"];

let components = {};
let modelName = "";

const followed = (schema) => (schema?.$ref ? components[schema.$ref.split("/").at(-1)] : schema) || {};
const alternatives = (schema) => schema.anyOf || schema.oneOf || [schema];
const isNull = (schema) => schema.type === "null";

/** A schema in a few words: "string", "list of integer", "string or ChatReply". */
function kindOf(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  // Null means the same as leaving a field out, so it says nothing here.
  if (schema.anyOf || schema.oneOf) return alternatives(schema).filter((part) => !isNull(part)).map(kindOf).join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" or ");
  if (schema.type === "array") return schema.items && Object.keys(schema.items).length ? `list of ${kindOf(schema.items)}` : "list";
  if (schema.type === "object" && schema.additionalProperties && schema.additionalProperties !== true) return `object of ${kindOf(schema.additionalProperties)}`;
  return schema.type || "any JSON";
}

/** The object schemas a field may hold, with their names. */
function objectsIn(schema) {
  if (schema.$ref) return [[kindOf(schema), followed(schema)]].filter(([, inner]) => inner.properties);
  if (schema.anyOf || schema.oneOf) return alternatives(schema).flatMap(objectsIn);
  if (schema.type === "array" && schema.items) return objectsIn(schema.items);
  return schema.properties ? [["object", schema]] : [];
}

function shapeOf(schema, depth = 0) {
  const objects = objectsIn(schema);
  if (!objects.length) return make("p", { className: "dim", textContent: kindOf(schema) });
  const [, object] = objects[0];
  const required = new Set(object.required || []);
  return make("ul", { className: "shape" }, ...Object.entries(object.properties).map(([name, part]) => row(name, part, required.has(name), depth)));
}

function row(name, part, isRequired, depth) {
  const fallback = part.default !== undefined && part.default !== null ? `, default ${JSON.stringify(part.default)}` : "";
  const made = make("li", {},
    make("span", { className: "name" }, name, isRequired ? make("b", { textContent: " required" }) : ""),
    make("span", { className: "kind", textContent: kindOf(part) + fallback + (part.description ? `. ${part.description}` : "") }));
  if (depth < MAX_DEPTH) for (const [inner, schema] of objectsIn(part)) made.append(folded(inner, schema, depth + 1));
  return made;
}

/** A shape that is built when it is opened: some contain themselves. */
function folded(name, schema, depth) {
  const made = make("details", {}, make("summary", { textContent: name }));
  made.addEventListener("toggle", () => { if (made.children.length === 1) made.append(shapeOf(schema, depth)); }, { once: true });
  return made;
}

/** The smallest value a schema takes, to start typing from. */
function smallest(schema, depth = 0) {
  const inner = followed(schema);
  if (depth > MAX_DEPTH) return null;
  if (inner.default !== undefined) return inner.default;
  if (inner.anyOf) return smallest(inner.anyOf.find((part) => !isNull(part)) || {}, depth + 1);
  if (inner.properties) return Object.fromEntries((inner.required || []).map((name) => [name, smallest(inner.properties[name], depth + 1)]));
  return { string: "", integer: 0, number: 0, boolean: false, array: [], object: {} }[inner.type] ?? null;
}

function startingBody(path, schema) {
  const known = STARTING_BODIES[path];
  if (!known) return smallest(schema);
  return followed(schema).properties?.model && modelName ? { model: modelName, ...known } : known;
}

function repliesOf(operation) {
  return make("ul", { className: "replies" }, ...Object.entries(operation.responses).map(([code, reply]) => {
    const types = Object.entries(reply.content || {}).map(([type, { schema }]) => (type === "application/json" ? kindOf(schema) : type));
    return make("li", {}, make("span", { className: "code", textContent: code }), make("span", {}, reply.description, make("span", { className: "dim", textContent: types.length ? `: ${types.join(" or ")}` : "" })));
  }));
}

const anchorOf = (method, path) => `${method}${path.replace(/[{}]/g, "")}`;

function routeOf(path, method, operation) {
  const made = make("details", { className: "route", id: anchorOf(method, path) },
    make("summary", {}, make("span", { className: "method", "data-method": method, textContent: method.toUpperCase() }),
      make("code", { textContent: path }), make("span", { className: "dim", textContent: operation.summary })));
  made.addEventListener("toggle", () => { if (made.children.length === 1) made.append(insideOf(path, method, operation)); });
  return made;
}

function insideOf(path, method, operation) {
  const body = operation.requestBody?.content["application/json"]?.schema;
  const reply = operation.responses["200"]?.content?.["application/json"]?.schema;
  const part = (title, content) => make("section", {}, make("h3", { textContent: title }), content);
  const made = make("div", { className: "inside" });
  if (operation.description) made.append(make("p", { textContent: operation.description }));
  made.append(part("Try it", trialOf(path, method, operation, body)));
  if (operation.parameters) made.append(part("Parameters", parametersOf(operation.parameters)));
  if (body) made.append(part("Body", shapeOf(body)));
  made.append(part("Replies", repliesOf(operation)));
  if (reply && objectsIn(reply).length) made.append(part("Reply", shapeOf(reply)));
  return made;
}

function parametersOf(parameters) {
  return make("ul", { className: "shape" }, ...parameters.map((item) => row(item.name, { ...item.schema, description: [`in the ${item.in}`, item.description].filter(Boolean).join(": ") }, item.required, 0)));
}

// Calling

function trialOf(path, method, operation, schema) {
  const anchor = anchorOf(method, path);
  const made = make("form", { className: "try" });
  const inputs = (operation.parameters || []).map((item) => {
    const input = make("input", { id: `${anchor} ${item.name}`, spellcheck: false, placeholder: item.description || "" });
    made.append(make("div", { className: "field" }, make("label", { for: input.id, textContent: item.name }), input));
    return [item, input];
  });
  const text = schema && make("textarea", { id: `${anchor} body`, className: "mono", spellcheck: false, value: JSON.stringify(startingBody(path, schema), null, 2) });
  if (text) made.append(make("div", { className: "field" }, make("label", { for: text.id, textContent: "JSON body" }), text));
  const output = make("pre", { hidden: true, tabIndex: 0, "aria-live": "polite", "aria-label": "Reply" });
  const send = make("button", { type: "submit", className: "primary", textContent: "Send" });
  const halt = make("button", { type: "button", textContent: "Stop", hidden: true });
  const curl = make("button", { type: "button", textContent: "Copy as curl" });
  const url = () => filledIn(path, inputs);
  curl.addEventListener("click", () => copy(curlOf(method.toUpperCase(), url(), text ? text.value : null, { hasKey: Boolean(currentKey()) }), curl));
  made.addEventListener("submit", async (event) => {
    event.preventDefault();
    const controller = new AbortController();
    halt.onclick = () => controller.abort();
    output.hidden = false;
    send.disabled = true;
    halt.hidden = false;
    await call(method.toUpperCase(), url(), text ? text.value : null, output, controller.signal);
    send.disabled = false;
    halt.hidden = true;
  });
  made.append(make("div", { className: "row" }, send, halt, curl), output);
  return made;
}

function filledIn(path, inputs) {
  let filled = path;
  const query = new URLSearchParams();
  for (const [item, input] of inputs) {
    if (item.in === "path") filled = filled.replace(`{${item.name}}`, () => encodeURIComponent(input.value));
    else if (input.value) query.set(item.name, input.value);
  }
  return address(filled) + (query.size ? `?${query}` : "");
}

async function call(method, url, body, output, signal) {
  const begun = performance.now();
  output.textContent = "…";
  try {
    const headers = { ...keyHeaders(), ...(body === null ? {} : { "Content-Type": "application/json" }) };
    const reply = await fetch(url, { method, headers, body: body ?? undefined, signal });
    const head = [`HTTP ${reply.status} ${reply.statusText}`.trim(), ...[...reply.headers].map(([name, value]) => `${name}: ${value}`)].join("\n");
    let text = "";
    if (reply.body) {
      const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let read = await reader.read(); !read.done; read = await reader.read()) {
        text += read.value;
        output.textContent = `${head}\n\n${text}`;
      }
    }
    output.textContent = `${head}\n\n${pretty(text)}\n\n(${(performance.now() - begun).toFixed(0)} ms)`;
  } catch (error) {
    output.textContent = signal.aborted ? `${output.textContent}\n\n(stopped)` : `The server does not answer: ${error.message}`;
  }
}

// The list

function showRoutes(specification) {
  components = specification.components.schemas;
  byId("version").textContent = `version ${specification.info.version}`;
  const groups = new Map();
  for (const [path, methods] of Object.entries(specification.paths)) {
    for (const [method, operation] of Object.entries(methods)) {
      const tag = operation.tags[0];
      if (!groups.has(tag)) groups.set(tag, []);
      groups.get(tag).push([path, method, operation]);
    }
  }
  byId("routes").replaceChildren(...[...groups].map(([tag, rows]) => make("section", {}, make("h2", { textContent: tag }), ...rows.map((entry) => routeOf(...entry)))));
  byId("index").replaceChildren(...[...groups].map(([tag, rows]) => make("section", {}, make("h2", { textContent: tag }),
    make("ul", {}, ...rows.map(([path, method]) => make("li", {}, make("a", { href: `#${anchorOf(method, path)}` },
      make("span", { className: "method", "data-method": method, textContent: method.toUpperCase() }), path)))))));
  openNamed();
}

/** Open the route the address names. */
function openNamed() {
  const named = byId(decodeURIComponent(location.hash.slice(1)));
  if (!named?.classList.contains("route")) return;
  named.open = true;
  named.scrollIntoView();
  named.querySelector("summary").focus({ preventScroll: true });
}

function filterRoutes() {
  const words = byId("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const isWanted = (element) => words.every((word) => element.textContent.toLowerCase().includes(word));
  const wanted = new Set();
  for (const route of document.querySelectorAll(".route")) {
    route.hidden = !isWanted(route.querySelector("summary"));
    if (!route.hidden) wanted.add(route.id);
  }
  for (const link of document.querySelectorAll("#index a")) link.parentElement.hidden = !wanted.has(link.getAttribute("href").slice(1));
  for (const section of document.querySelectorAll("main > section, #index > section")) section.hidden = !section.querySelector(".route:not([hidden]), li:not([hidden])");
}

async function load() {
  byId("home-link").href = HOME.href;
  byId("document-link").href = address("openapi.json");
  const models = await fetch(address("v1/models"), { headers: keyHeaders() }).then((reply) => reply.json(), () => ({}));
  modelName = models.data?.[0]?.id || "";
  const reply = await fetch(address("openapi.json"));
  if (!reply.ok) throw new Error(`${reply.status}: ${await reply.text()}`);
  showRoutes(await reply.json());
}

setUpTheme();
setUpKey(() => {});
byId("filter").addEventListener("input", filterRoutes);
addEventListener("hashchange", openNamed);
load().catch((error) => { byId("routes").replaceChildren(make("p", { className: "problem", textContent: `The document could not be read: ${error.message}` })); });
