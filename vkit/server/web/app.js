// The page around the views: tabs, settings, the server's state and its models.

const VIEWS = ["chat", "raw", "live"];
const WIDE = matchMedia("(min-width: 861px)");
const HEALTH_MS = { ready: 10000, other: 1500 };

let serverVersion = "";
let areSettingsWanted = true;
let wasReady = false;

function showView(name, { focus = false } = {}) {
  for (const view of VIEWS) {
    const isShown = view === name;
    byId(`view-${view}`).hidden = !isShown;
    byId(`tab-${view}`).setAttribute("aria-selected", String(isShown));
    byId(`tab-${view}`).tabIndex = isShown ? 0 : -1;
  }
  if (focus) byId(`tab-${name}`).focus();
  // Settings belong to the chat: beside the other views they would only take room.
  byId("settings-button").hidden = name !== "chat";
  openSettings(name === "chat" && WIDE.matches && areSettingsWanted);
  if (name === "raw") chooseExchange(chosen);
  if (name === "live") wakeLive();
  history.replaceState(null, "", name === "chat" ? location.pathname + location.search : `#${name}`);
}

function setUpTabs() {
  for (const [index, name] of VIEWS.entries()) {
    byId(`tab-${name}`).addEventListener("click", () => showView(name));
    byId(`tab-${name}`).addEventListener("keydown", (event) => {
      const target = { ArrowRight: index + 1, ArrowLeft: index - 1 + VIEWS.length, Home: 0, End: VIEWS.length - 1 }[event.key];
      if (target === undefined) return;
      event.preventDefault();
      showView(VIEWS[target % VIEWS.length], { focus: true });
    });
  }
  const named = location.hash.slice(1);
  if (VIEWS.includes(named)) showView(named);
}

function openSettings(isOpen) {
  byId("settings").hidden = !isOpen;
  document.body.classList.toggle("with-settings", isOpen);
  byId("settings-button").setAttribute("aria-expanded", String(isOpen));
}

function setUpSettings() {
  const toggle = () => {
    areSettingsWanted = byId("settings").hidden;
    openSettings(areSettingsWanted);
    if (!byId("settings").hidden && !WIDE.matches) byId("model").focus();
  };
  byId("settings-button").addEventListener("click", toggle);
  byId("settings-close").addEventListener("click", () => { openSettings(false); byId("settings-button").focus(); });
  openSettings(WIDE.matches);
  WIDE.addEventListener("change", () => openSettings(WIDE.matches && areSettingsWanted && !byId("view-chat").hidden));
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || event.isComposing) return;
    if (running) stop();
    else if (!byId("settings").hidden && !WIDE.matches) {
      openSettings(false);
      byId("settings-button").focus();
    }
  });
}

/** The names the server answers to. */
async function loadModels() {
  const place = byId("key-problem");
  let reply;
  try {
    reply = await fetch(address("v1/models"), { headers: keyHeaders() });
  } catch {
    return; // the state of the connection is shown beside the name
  }
  const text = await reply.text();
  place.hidden = reply.ok;
  byId("key").setAttribute("aria-invalid", String(!reply.ok));
  if (!reply.ok) {
    const refusal = refusalOf(reply.status, text);
    place.textContent = `${refusal.title}: ${refusal.message}`;
    if (reply.status === 401) openSettings(true);
    return;
  }
  const models = JSON.parse(text).data;
  const before = modelName();
  byId("model").replaceChildren(...models.map((model) => make("option", { value: model.id, textContent: model.id })));
  if (models.some((model) => model.id === before)) byId("model").value = before;
  contextLimit = models.find((model) => model.id === modelName())?.max_model_len ?? null;
  if (!turns.length) showBlank();
}

/** Ask whether the server is ready, again and again while the page is visible. */
async function watchHealth() {
  let state = "down";
  let text = "not reachable";
  try {
    const reply = await fetch(address("v1/health/ready"), { cache: "no-store" });
    state = reply.ok ? "ready" : "loading";
    text = reply.ok ? "ready" : refusalOf(reply.status, await reply.text()).message;
  } catch { /* state says so */ }
  const place = byId("health");
  if (place.textContent !== text) place.textContent = text;
  place.dataset.state = state;
  if (state === "ready" && !wasReady) loadModels();
  wasReady = state === "ready";
  setTimeout(whenVisible, HEALTH_MS[state] || HEALTH_MS.other);
}

function whenVisible() {
  if (!document.hidden) watchHealth();
  else document.addEventListener("visibilitychange", watchHealth, { once: true });
}

async function lookAround() {
  try {
    const [version, docs] = await Promise.all([fetch(address("version")), fetch(address("docs"), { method: "HEAD" })]);
    serverVersion = (await version.json()).version;
    byId("docs-link").hidden = !docs.ok;
    showAbout();
  } catch { /* shown by the health line */ }
}

byId("docs-link").href = address("docs");
byId("metrics-link").href = address("metrics");
setUpTheme();
setUpOptions();
setUpChat();
setUpRaw();
setUpLive();
setUpSettings();
setUpKey(loadModels);
setUpTabs();
loadModels();
watchHealth();
lookAround();
byId("prompt").focus({ preventScroll: true });
