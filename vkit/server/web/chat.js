// The playground: options, the conversation, one request at a time, and what went over the wire.

const SAMPLING = [
  { name: "temperature", hint: "0 to 2" },
  { name: "top_p", hint: "0 to 1" },
  { name: "top_k", hint: "0: off", whole: true },
  { name: "min_p", hint: "0 to 1" },
  { name: "max_tokens", hint: "all that fits", whole: true },
  { name: "seed", hint: "random", whole: true },
  { name: "presence_penalty", hint: "-2 to 2" },
  { name: "frequency_penalty", hint: "-2 to 2" },
  { name: "repetition_penalty", hint: "1: off" },
];
const STARTERS = [
  "Explain in three sentences how a cache of keys and values makes text generation faster.",
  "Write a Python function that returns the longest word of a sentence.",
  "Suggest five names for a small boat, one per line.",
];
const TOOLS_EXAMPLE = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather at a place",
    parameters: { type: "object", properties: { place: { type: "string" } }, required: ["place"] },
  },
}];
const SCHEMA_EXAMPLE = {
  type: "object",
  properties: { name: { type: "string" }, year: { type: "integer" }, tags: { type: "array", items: { type: "string" } } },
  required: ["name", "year", "tags"],
  additionalProperties: false,
};
const REMEMBERED = [...SAMPLING.map((row) => row.name), "stop", "system", "tools", "tool_choice", "schema"];

/** Turns in order: {message, element, exchange}; message is null where the server answered with nothing usable. */
let turns = [];
const exchanges = [];
let running = null;
/** The exchange the raw view shows. */
let chosen = null;
let contextLimit = null;

// Options

function setUpOptions() {
  const grid = byId("sampling");
  for (const { name, hint, whole } of SAMPLING) {
    const input = make("input", {
      id: name, type: "text", inputMode: whole ? "numeric" : "decimal", placeholder: hint, spellcheck: false,
      "aria-describedby": `${name}-problem`,
    });
    grid.append(fieldOf(name, input));
  }
  const stop = make("textarea", { id: "stop_strings", rows: 2, placeholder: "one string per line", spellcheck: false, "aria-describedby": "stop-problem" });
  const field = fieldOf("stop", stop);
  field.classList.add("wide");
  grid.append(field);
  const kept = JSON.parse(recall("sessionStorage", "vkit.options") || "{}");
  for (const name of REMEMBERED) if (kept[name]) control(name).value = kept[name];
  byId("options").addEventListener("input", (event) => {
    clearProblem(event.target);
    keepOptions();
  });
  byId("options").addEventListener("submit", (event) => event.preventDefault());
  byId("defaults").addEventListener("click", () => {
    for (const { name } of SAMPLING) setOption(name, "");
    setOption("stop", "");
  });
  byId("tools-example").addEventListener("click", () => setOption("tools", JSON.stringify(TOOLS_EXAMPLE, null, 2)));
  byId("schema-example").addEventListener("click", () => setOption("schema", JSON.stringify(SCHEMA_EXAMPLE, null, 2)));
  showWhatIsSet();
}

function fieldOf(name, input) {
  return make("div", { className: "field" }, make("label", { for: input.id, className: "mono", textContent: name }), input,
    make("p", { className: "problem", id: `${name}-problem`, hidden: true }));
}

const control = (name) => byId({ stop: "stop_strings", response_format: "schema" }[name] || name);

function setOption(name, value) {
  const input = control(name);
  input.value = value;
  clearProblem(input);
  keepOptions();
}

function keepOptions() {
  remember("sessionStorage", "vkit.options", JSON.stringify(Object.fromEntries(REMEMBERED.map((name) => [name, control(name).value]))));
  showWhatIsSet();
}

function showWhatIsSet() {
  for (const name of ["tools", "schema"]) byId(`${name}-group`).querySelector(".set").hidden = !byId(name).value.trim();
}

const problemBeside = (input) => input.closest(".field")?.querySelector(".problem") || null;

function clearProblem(input) {
  input.removeAttribute("aria-invalid");
  const place = problemBeside(input);
  if (place) place.hidden = true;
}

/** Mark the control a message is about and open what hides it. */
function showProblem(input, message) {
  const place = problemBeside(input);
  input.setAttribute("aria-invalid", "true");
  place.textContent = message;
  place.hidden = false;
  const group = input.closest("details");
  if (group) group.open = true;
}

class WrongOption extends Error {
  constructor(option, message) {
    super(message);
    this.option = option;
  }
}

/** The request without its messages. Only what cannot be written as JSON is refused here; the server judges the rest. */
function readOptions() {
  const body = {};
  for (const { name, whole } of SAMPLING) {
    const text = control(name).value.trim();
    if (text) body[name] = readNumber(name, text, whole);
  }
  const stops = control("stop").value.split("\n").filter((line) => line).map(unescaped);
  if (stops.length) body.stop = stops;
  const tools = readJson("tools");
  if (tools !== undefined) body.tools = tools;
  if (control("tool_choice").value) body.tool_choice = control("tool_choice").value;
  const schema = readJson("schema");
  if (schema !== undefined) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
  return body;
}

function readNumber(name, text, whole) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new WrongOption(name, `${name}: not a number: ${text}`);
  if (whole && Number.isInteger(value) && !Number.isSafeInteger(value)) {
    throw new WrongOption(name, `${name}: a browser cannot write ${text} exactly; use at most 15 digits`);
  }
  return value;
}

const unescaped = (text) => text.replace(/\\([nt\\])/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);

function readJson(name) {
  const text = byId(name).value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new WrongOption(name, `${byId(name).labels[0].textContent}: not JSON: ${error.message}`);
  }
}

// Rendering

/** Text as paragraphs and fenced code: [{kind: "text" | "code", text, language, closed}]. */
function segments(text) {
  const parts = [];
  let position = 0;
  for (const match of text.matchAll(/^```([^\n`]*)\n([\s\S]*?)(?:^```[ \t]*$\n?|(?![\s\S]))/gm)) {
    if (match.index > position) parts.push({ kind: "text", text: text.slice(position, match.index) });
    parts.push({ kind: "code", text: match[2].replace(/\n$/, ""), language: match[1].trim() });
    position = match.index + match[0].length;
  }
  if (position < text.length) parts.push({ kind: "text", text: text.slice(position) });
  return parts.map((part) => (part.kind === "text" ? { ...part, text: part.text.replace(/^\n+|\n+$/g, "") } : part))
    .filter((part) => part.kind === "code" || part.text);
}

/** Show text in `place`, touching only the parts that changed: a long answer arrives in thousands of pieces. */
function showText(place, text) {
  const parts = segments(text);
  parts.forEach((part, index) => {
    const old = place.children[index];
    if (old && old.shownText === part.text && old.shownKind === part.kind) return;
    if (old && old.shownKind === part.kind && part.kind === "code") old.querySelector("code").textContent = part.text;
    else {
      const made = part.kind === "code" ? codeBlock(part) : paragraph(part.text);
      old ? old.replaceWith(made) : place.append(made);
    }
    Object.assign(place.children[index], { shownText: part.text, shownKind: part.kind });
  });
  while (place.children.length > parts.length) place.lastElementChild.remove();
}

function paragraph(text) {
  const made = make("p");
  text.split(/`([^`\n]+)`/).forEach((piece, index) => made.append(index % 2 ? make("code", { textContent: piece }) : piece));
  return made;
}

function codeBlock({ text, language }) {
  const code = make("code", { textContent: text });
  const button = make("button", { type: "button", className: "plain", textContent: "Copy" });
  button.addEventListener("click", () => copy(code.textContent, button));
  return make("figure", { className: "code" }, make("figcaption", {}, make("span", { textContent: language || "code" }), button), make("pre", { tabIndex: 0 }, code));
}

const smallButton = (label, action) => make("button", { type: "button", className: "plain", textContent: label, onclick: action });

/** Whether the end of the conversation is in view, so that it should stay there. */
const isAtEnd = () => { const log = byId("log"); return log.scrollHeight - log.scrollTop - log.clientHeight < 60; };
function toEnd() {
  const log = byId("log");
  log.scrollTop = log.scrollHeight;
}

function showBlank() {
  const log = byId("log");
  log.replaceChildren(make("div", { className: "blank" },
    make("div", {}, make("h2", { textContent: modelName() ? `Talk to ${modelName()}` : "Talk to your model" }),
      make("p", { className: "dim", id: "about" })),
    make("ul", { "aria-label": "Ideas" }, ...STARTERS.map((text) => make("li", {}, make("button", {
      type: "button", textContent: text, onclick: () => { byId("prompt").value = text; byId("prompt").focus(); },
    }))))));
  showAbout();
}

function showAbout() {
  const about = byId("about");
  if (!about) return;
  const facts = [contextLimit && `${grouped(contextLimit)} tokens of context`, serverVersion && `vkit ${serverVersion}`];
  about.textContent = facts.filter(Boolean).join(", ");
}

const grouped = (number) => number.toLocaleString("en").replaceAll(",", "\u202f");
const milliseconds = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`);
const modelName = () => byId("model").value;

// Conversation

function addUserTurn(text) {
  const place = make("div", { className: "text" });
  showText(place, text);
  const turn = { message: { role: "user", content: text }, exchange: null };
  turn.element = make("article", { className: "turn user", "aria-label": "You" }, place, smallButton("Edit", () => edit(turn)));
  append(turn);
}

function append(turn) {
  if (!turns.length) byId("log").replaceChildren();
  turns.push(turn);
  byId("log").append(turn.element);
  toEnd();
}

/** Forget this turn and all after it. */
function cutAt(turn) {
  const index = turns.indexOf(turn);
  for (const gone of turns.splice(index)) gone.element.remove();
  if (!turns.length) showBlank();
  showContext();
}

function edit(turn) {
  if (running) return;
  byId("prompt").value = turn.message.content;
  cutAt(turn);
  byId("prompt").focus();
}

function submit() {
  const text = byId("prompt").value;
  if (running || !text.trim()) return;
  // A question the server refused is not part of the conversation: this one takes its place.
  const refused = turns.findLastIndex((turn) => turn.message?.role === "user");
  if (refused >= 0 && !turns.slice(refused + 1).some((turn) => turn.message)) cutAt(turns[refused]);
  const options = optionsOrComplaint();
  if (!options) return;
  byId("prompt").value = "";
  addUserTurn(text);
  answer(options);
}

function optionsOrComplaint() {
  const place = byId("composer-problem");
  place.hidden = true;
  try {
    return readOptions();
  } catch (error) {
    if (!(error instanceof WrongOption)) throw error;
    place.textContent = error.message;
    place.hidden = false;
    openSettings(true);
    showProblem(control(error.option), error.message);
    control(error.option).focus();
    return null;
  }
}

function requestBody(options) {
  const system = byId("system").value.trim() ? [{ role: "system", content: byId("system").value }] : [];
  const body = { model: modelName() || undefined, messages: [...system, ...turns.filter((turn) => turn.message).map((turn) => turn.message)], ...options };
  if (byId("stream").checked) Object.assign(body, { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true } });
  return body;
}

/** Ask the server to continue the conversation, and show what comes. */
async function answer(options) {
  const body = JSON.stringify(requestBody(options));
  const exchange = {
    number: exchanges.length + 1, url: address("v1/chat/completions"), body, hasKey: Boolean(currentKey()), streams: byId("stream").checked,
    head: "", text: "", content: "", reasoning: "", calls: [], usage: null, finish: null, refusal: null, isStopped: false,
    startedAt: performance.now(), firstAt: null, lastAt: null,
  };
  exchanges.push(exchange);
  chosen = exchange;
  listExchanges();
  const turn = { message: null, exchange };
  turn.element = make("article", { className: "turn assistant busy", "aria-label": modelName() || "Model", "aria-busy": "true" });
  append(turn);
  running = { controller: new AbortController(), exchange };
  setBusy(true);
  announce("Answering");
  const draw = drawer(turn);
  try {
    await transfer(exchange, running.controller.signal, draw);
  } catch (error) {
    if (running.controller.signal.aborted) exchange.isStopped = true;
    else exchange.refusal = { title: "No answer", message: `The connection failed: ${error.message}`, field: null };
  }
  exchange.endedAt = performance.now();
  running = null;
  draw.now();
  finish(turn);
}

/** Draws at most once per frame, however often it is asked. */
function drawer(turn) {
  let frame = 0;
  const now = () => {
    cancelAnimationFrame(frame);
    frame = 0;
    const wasAtEnd = isAtEnd();
    showAnswer(turn);
    if (wasAtEnd) toEnd();
    byId("latest").hidden = isAtEnd();
    showRaw(turn.exchange);
  };
  const soon = () => { frame = frame || requestAnimationFrame(now); };
  soon.now = now;
  return soon;
}

async function transfer(exchange, signal, draw) {
  const reply = await fetch(exchange.url, { method: "POST", headers: { "Content-Type": "application/json", ...keyHeaders() }, body: exchange.body, signal });
  exchange.head = [`HTTP ${reply.status} ${reply.statusText}`.trim(), ...[...reply.headers].map(([name, value]) => `${name}: ${value}`)].join("\n");
  exchange.ignored = reply.headers.get("x-vkit-ignored-fields");
  if (!reply.ok) {
    exchange.text = await reply.text();
    exchange.refusal = refusalOf(reply.status, exchange.text);
    return;
  }
  if (!exchange.streams) {
    exchange.text = await reply.text();
    exchange.firstAt = exchange.lastAt = performance.now();
    take(exchange, JSON.parse(exchange.text));
    return;
  }
  const heard = (text) => { exchange.text += text; };
  for await (const data of serverSentEvents(reply.body, heard)) {
    if (data === "[DONE]") break;
    const chunk = JSON.parse(data);
    if (chunk.error) exchange.refusal = refusalOf(chunk.error.code, data);
    else take(exchange, chunk);
    draw();
  }
}

/** Add a chunk of a stream, or a whole reply, to the exchange. */
function take(exchange, chunk) {
  if (chunk.usage) exchange.usage = chunk.usage;
  for (const choice of chunk.choices) {
    const part = choice.delta || choice.message;
    const thought = part.reasoning_content ?? part.reasoning ?? "";
    exchange.content += part.content || "";
    exchange.reasoning += thought;
    for (const piece of part.tool_calls || []) takeCall(exchange, piece);
    if (part.content || thought || part.tool_calls?.length) {
      exchange.lastAt = performance.now();
      exchange.firstAt ??= exchange.lastAt;
    }
    if (choice.finish_reason) exchange.finish = choice.stop_reason ? `${choice.finish_reason} (${choice.stop_reason})` : choice.finish_reason;
  }
}

function takeCall(exchange, piece) {
  const index = piece.index ?? exchange.calls.length;
  const call = (exchange.calls[index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  if (piece.id) call.id = piece.id;
  if (piece.function?.name) call.function.name = piece.function.name;
  call.function.arguments += piece.function?.arguments || "";
}

function showAnswer({ element, exchange }) {
  if (!element.children.length) {
    element.append(make("p", { className: "who", textContent: element.getAttribute("aria-label") }),
      make("details", { className: "thinking", open: true, hidden: true }, make("summary", { textContent: "Reasoning" }), make("p")),
      make("div", { className: "text" }), make("div", { className: "calls" }));
  }
  const [, thinking, text, calls] = element.children;
  thinking.hidden = !exchange.reasoning;
  if (thinking.lastChild.textContent !== exchange.reasoning) thinking.lastChild.textContent = exchange.reasoning;
  showText(text, exchange.content);
  calls.replaceChildren(...exchange.calls.map((call) => make("div", { className: "call" },
    make("h3", { textContent: call.function.name }), make("pre", { textContent: call.function.arguments }))));
  showContext(exchange);
}

/** The answer is complete, stopped or refused: settle it. */
function finish(turn) {
  const { element, exchange } = turn;
  element.classList.remove("busy");
  element.setAttribute("aria-busy", "false");
  const calls = exchange.calls.filter(Boolean);
  // A call that was cut in the middle cannot be sent back.
  const isUsable = exchange.content || (calls.length && !exchange.isStopped && !exchange.refusal);
  if (isUsable) {
    turn.message = { role: "assistant", content: exchange.content || null };
    if (calls.length && !exchange.isStopped) turn.message.tool_calls = calls;
  }
  const [, thinking, text, callBox] = element.children;
  if (exchange.reasoning && exchange.content) thinking.open = false;
  text.hidden = !exchange.content;
  callBox.hidden = !calls.length;
  if (turn.message?.tool_calls) offerToolReplies(turn, callBox);
  if (exchange.refusal) element.append(refusalBox(exchange.refusal));
  if (exchange.ignored) element.append(make("p", { className: "note", textContent: `No effect on this server: ${exchange.ignored}` }));
  element.append(factsOf(turn));
  if (!isUsable && exchange.refusal) giveBack(turn);
  setBusy(false);
  listExchanges();
  showRaw(exchange);
  showContext();
  if (isAtEnd() || exchange.refusal) toEnd();
  announce(exchange.refusal ? "" : exchange.isStopped ? "Stopped" : `Answer complete, ${exchange.usage?.completion_tokens ?? "unknown"} tokens`);
}

/** A refused question goes back to where it was typed, so that Enter tries again. */
function giveBack(turn) {
  const question = turns[turns.indexOf(turn) - 1];
  if (question?.message?.role !== "user") return;
  question.element.classList.add("unanswered");
  if (!byId("prompt").value) byId("prompt").value = question.message.content;
}

function refusalBox({ title, message, field }) {
  const input = field && control(field.split(".")[0]);
  if (input?.closest("#options") && problemBeside(input)) showProblem(input, message);
  return make("div", { className: "refusal", role: "alert" }, make("b", { textContent: field ? `${title}, param ${field}` : title }), make("p", { textContent: message }));
}

function factsOf(turn) {
  const { exchange } = turn;
  const facts = make("div", { className: "grow num" });
  const fact = (strong, rest) => facts.append(make("span", {}, make("b", { textContent: strong }), ` ${rest}`));
  const { usage } = exchange;
  if (usage) {
    fact(grouped(usage.completion_tokens), usage.completion_tokens === 1 ? "token" : "tokens");
    const seconds = (exchange.streams ? exchange.lastAt - exchange.firstAt : exchange.lastAt - exchange.startedAt) / 1000;
    const counted = exchange.streams ? usage.completion_tokens - 1 : usage.completion_tokens;
    if (counted > 0 && seconds > 0) fact((counted / seconds).toFixed(1), "tokens/s");
  }
  if (exchange.firstAt !== null) fact(milliseconds(exchange.firstAt - exchange.startedAt), exchange.streams ? "to first token" : "in all");
  if (usage) {
    const cached = usage.prompt_tokens_details?.cached_tokens;
    fact(grouped(usage.prompt_tokens), cached ? `prompt tokens, ${grouped(cached)} cached` : "prompt tokens");
  }
  if (exchange.isStopped) fact("stopped", "by you");
  else if (exchange.finish) fact(exchange.finish, "");
  const actions = make("div", {});
  if (exchange.content) {
    const button = smallButton("Copy", () => copy(exchange.content, button));
    actions.append(button);
  }
  actions.append(smallButton("Raw", () => { chooseExchange(exchange); showView("raw"); }));
  actions.append(smallButton("Retry", () => retry(turn)));
  return make("div", { className: "facts" }, facts, actions);
}

function retry(turn) {
  if (running) return;
  const options = optionsOrComplaint();
  if (!options) return;
  const question = turns[turns.indexOf(turn) - 1];
  question?.element.classList.remove("unanswered");
  if (question?.message?.role === "user" && byId("prompt").value === question.message.content) byId("prompt").value = "";
  cutAt(turn);
  answer(options);
}

/** Fields for what the tools returned, under the calls. */
function offerToolReplies(turn, box) {
  const fields = turn.message.tool_calls.map((call, index) => {
    const id = `reply-${turn.exchange.number}-${index}`;
    const field = make("textarea", { id, rows: 2, className: "mono", spellcheck: false });
    box.children[index].append(make("div", { className: "reply" }, make("label", { for: id, textContent: `What ${call.function.name} returned` }), field));
    return field;
  });
  const button = make("button", { type: "button", textContent: fields.length > 1 ? "Send results" : "Send result", onclick: () => {
    if (running || turns.at(-1) !== turn) return;
    const options = optionsOrComplaint();
    if (!options) return;
    fields.forEach((field, index) => {
      field.readOnly = true;
      turns.push({ message: { role: "tool", tool_call_id: turn.message.tool_calls[index].id, content: field.value }, element: make("div"), exchange: null });
    });
    button.remove();
    answer(options);
  } });
  box.append(make("div", { className: "row" }, button));
}

function stop() {
  running?.controller.abort();
}

function setBusy(isBusy) {
  const hadFocus = [byId("stop"), byId("send")].includes(document.activeElement);
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  if (hadFocus) byId("prompt").focus();
}

function announce(text) {
  byId("announcer").textContent = text;
}

function showContext(exchange = turns.findLast((turn) => turn.exchange?.usage)?.exchange) {
  const used = exchange?.usage ? exchange.usage.prompt_tokens + exchange.usage.completion_tokens : 0;
  byId("context").textContent = used && turns.length ? `${grouped(used)}${contextLimit ? ` of ${grouped(contextLimit)}` : ""} tokens` : "";
}

function newChat() {
  stop();
  turns = [];
  showBlank();
  showContext();
  byId("composer-problem").hidden = true;
  byId("prompt").focus();
}

function exportChat() {
  const saved = {
    exported_at: new Date().toISOString(),
    server: HOME.href,
    model: modelName(),
    system: byId("system").value || null,
    messages: turns.filter((turn) => turn.message).map((turn) => ({ ...turn.message, ...(turn.exchange && { usage: turn.exchange.usage, finish_reason: turn.exchange.finish }) })),
    requests: exchanges.map((exchange) => ({ request: JSON.parse(exchange.body), reply: exchange.text })),
  };
  const url = URL.createObjectURL(new Blob([JSON.stringify(saved, null, 2) + "\n"], { type: "application/json" }));
  make("a", { href: url, download: `vkit-chat-${saved.exported_at.slice(0, 19).replaceAll(":", "")}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// What went over the wire

function listExchanges() {
  const select = byId("raw-exchange");
  select.replaceChildren(...exchanges.map((exchange) => make("option", { value: exchange.number, textContent: `${exchange.number}: ${titleOf(exchange)}` })));
  chooseExchange(chosen);
}

function titleOf(exchange) {
  const last = JSON.parse(exchange.body).messages.at(-1);
  const text = String(last.content).replace(/\s+/g, " ").slice(0, 48);
  return exchange.refusal ? `${text} (${exchange.refusal.title})` : text;
}

function chooseExchange(exchange) {
  chosen = exchange;
  for (const id of ["raw-choice", "raw-curl", "raw-request", "raw-reply"]) byId(id).hidden = !exchange;
  byId("raw-blank").hidden = Boolean(exchange);
  if (!exchange) return;
  byId("raw-exchange").value = exchange.number;
  rawText("raw-curl", curlOf("POST", exchange.url, exchange.body, exchange));
  rawText("raw-request", pretty(exchange.body));
  showRaw(exchange);
}

/** Bring the reply up to date; only if somebody looks, for it grows with every token. */
function showRaw(exchange) {
  if (exchange !== chosen || byId("view-raw").hidden) return;
  rawText("raw-reply", `${exchange.head || "(waiting)"}\n\n${exchange.streams && !exchange.refusal ? exchange.text : pretty(exchange.text)}`);
}

function rawText(id, text) {
  byId(id).querySelector("pre").textContent = text;
}

function setUpRaw() {
  byId("raw-exchange").addEventListener("change", (event) => chooseExchange(exchanges[event.target.value - 1]));
  for (const id of ["raw-curl", "raw-request", "raw-reply"]) {
    const part = byId(id);
    const button = part.querySelector("button");
    button.setAttribute("aria-label", `Copy: ${part.querySelector("h2").textContent}`);
    button.addEventListener("click", () => copy(part.querySelector("pre").textContent, button));
  }
}

function setUpChat() {
  const prompt = byId("prompt");
  byId("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
  prompt.addEventListener("keydown", (event) => {
    // An Enter that chooses a candidate of an input method is not for us.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  });
  byId("stop").addEventListener("click", stop);
  byId("latest").addEventListener("click", () => { toEnd(); byId("latest").hidden = true; });
  byId("log").addEventListener("scroll", () => { byId("latest").hidden = isAtEnd(); });
  byId("reset").addEventListener("click", newChat);
  byId("export").addEventListener("click", exportChat);
  showBlank();
}
