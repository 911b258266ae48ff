// The live view: /metrics each second, as numbers, lines and histograms.

const LIVE_INTERVAL_MS = 1000;
const LIVE_POINTS = 120;
/** The first half minute is drawn at one scale; later the line grows denser up to LIVE_POINTS. */
const LIVE_LEAST_POINTS = 30;
const TILES = [
  { name: "running", title: "Running", unit: "", note: (now) => `${grouped(now.finished)} sequences finished` },
  { name: "waiting", title: "Waiting", unit: "", note: (now) => `${grouped(now.preemptions)} preemptions` },
  { name: "generated", title: "Generation", unit: "tokens/s", note: (now) => `${grouped(now.generatedTotal)} tokens so far` },
  { name: "prompt", title: "Prompt", unit: "tokens/s", note: (now) => `${grouped(now.promptTotal)} tokens so far` },
  { name: "cache", title: "KV cache in use", unit: "%", note: (now) => now.cacheShape },
  { name: "hits", title: "Prefix cache hits", unit: "%", note: (now) => `${grouped(now.hitTokens)} of ${grouped(now.queryTokens)} prompt tokens` },
];
const HISTOGRAMS = [
  { name: "vllm:time_to_first_token_seconds", title: "Time to first token" },
  { name: "vllm:inter_token_latency_seconds", title: "Between tokens" },
  { name: "vllm:e2e_request_latency_seconds", title: "Whole request" },
];
const SVG = "http://www.w3.org/2000/svg";

let liveTimer = 0;
/** Scrapes, oldest first: {at, metrics, values}. */
const scrapes = [];

/** Samples by name from Prometheus text: Map of name to [{labels, value}]. */
function parseMetrics(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const match = /^([A-Za-z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = {};
    for (const [, name, value] of (match[2] || "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)) labels[name] = value;
    if (!samples.has(match[1])) samples.set(match[1], []);
    samples.get(match[1]).push({ labels, value: match[3] === "+Inf" ? Infinity : Number(match[3]) });
  }
  return samples;
}

const total = (metrics, name) => (metrics.get(name) || []).reduce((sum, sample) => sum + sample.value, 0);

function valuesOf(metrics, at, before) {
  const generatedTotal = total(metrics, "vllm:generation_tokens_total");
  const promptTotal = total(metrics, "vllm:prompt_tokens_total");
  const queryTokens = total(metrics, "vllm:prefix_cache_queries_total");
  const hitTokens = total(metrics, "vllm:prefix_cache_hits_total");
  // A counter that fell belongs to a server that started anew.
  const rate = (now, then) => (before && now >= then ? (1000 * (now - then)) / (at - before.at) : 0);
  const shape = metrics.get("vllm:cache_config_info")?.[0].labels;
  return {
    running: total(metrics, "vllm:num_requests_running"),
    waiting: total(metrics, "vllm:num_requests_waiting"),
    generated: rate(generatedTotal, before?.values.generatedTotal),
    prompt: rate(promptTotal, before?.values.promptTotal),
    cache: 100 * total(metrics, "vllm:kv_cache_usage_perc"),
    hits: queryTokens ? (100 * hitTokens) / queryTokens : 0,
    cacheShape: shape ? `${grouped(Number(shape.num_gpu_blocks))} blocks of ${shape.block_size} tokens` : "",
    finished: total(metrics, "vllm:request_success_total"),
    preemptions: total(metrics, "vllm:num_preemptions_total"),
    generatedTotal, promptTotal, queryTokens, hitTokens,
  };
}

async function scrape() {
  const problem = byId("live-problem");
  try {
    const reply = await fetch(address("metrics"), { cache: "no-store" });
    const text = await reply.text();
    if (!reply.ok) {
      const refusal = refusalOf(reply.status, text);
      problem.textContent = `${refusal.title}: ${refusal.message}`;
    } else {
      const at = performance.now();
      const metrics = parseMetrics(text);
      scrapes.push({ at, metrics, values: valuesOf(metrics, at, scrapes.at(-1)) });
      if (scrapes.length > LIVE_POINTS) scrapes.shift();
      drawLive();
    }
    problem.hidden = reply.ok;
  } catch (error) {
    problem.textContent = `The server does not answer: ${error.message}`;
    problem.hidden = false;
  }
}

/** Scrape while the view can be seen, one scrape at a time. */
async function liveLoop() {
  if (byId("view-live").hidden || document.hidden) { liveTimer = 0; return; }
  const begun = performance.now();
  await scrape();
  liveTimer = setTimeout(liveLoop, Math.max(0, LIVE_INTERVAL_MS - (performance.now() - begun)));
}

function wakeLive() {
  if (liveTimer || byId("view-live").hidden || document.hidden) return;
  liveTimer = -1;
  liveLoop();
}

function setUpLive() {
  byId("tiles").append(...TILES.map(({ name, title, unit }) => make("section", { className: "tile", id: `tile-${name}` },
    make("div", {}, make("h3", { textContent: title }),
      make("p", { className: "value" }, make("span", { className: "number", textContent: "–" }), unit && make("small", { textContent: unit === "%" ? "%" : ` ${unit}` })),
      make("p", { className: "under num" })),
    drawing("svg", { class: "spark", viewBox: "0 0 120 40", preserveAspectRatio: "none", role: "img" },
      drawing("path", { class: "area" }), drawing("path", { class: "path" })))));
  byId("charts").append(...HISTOGRAMS.map(({ title }, index) => make("section", { className: "chart", id: `chart-${index}` },
    make("h3", { textContent: title }), make("p", { className: "marks num" }), drawing("svg", { class: "bars", viewBox: "0 0 300 132", role: "img" }))));
  byId("live-window").addEventListener("change", drawLive);
  document.addEventListener("visibilitychange", wakeLive);
}

function drawing(tag, attributes, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

function drawLive() {
  if (!scrapes.length) return;
  const now = scrapes.at(-1);
  for (const tile of TILES) drawTile(tile, now.values);
  HISTOGRAMS.forEach((histogram, index) => drawHistogram(byId(`chart-${index}`), histogram, now));
  drawCounts(now.metrics);
}

const shown = (value, unit) => {
  if (unit === "") return grouped(value);
  return value >= 1000 ? grouped(Math.round(value)) : value.toFixed(value >= 100 || value === 0 ? 0 : 1);
};

function drawTile({ name, title, unit, note }, values) {
  const tile = byId(`tile-${name}`);
  tile.querySelector(".number").textContent = shown(values[name], unit);
  tile.querySelector(".under").textContent = note(values);
  const series = scrapes.map((scraped) => scraped.values[name]);
  const top = unit === "%" ? 100 : Math.max(...series, 1);
  const slots = Math.max(series.length, LIVE_LEAST_POINTS);
  const points = series.map((value, index) => `${((120 * (slots - series.length + index)) / (slots - 1)).toFixed(2)} ${(38 - (35 * value) / top).toFixed(2)}`);
  const [area, path] = tile.querySelector("svg").children;
  const line = `M${points.join("L")}`;
  path.setAttribute("d", line);
  area.setAttribute("d", `${line}L120 40L${points[0].split(" ")[0]} 40Z`);
  tile.querySelector("svg").setAttribute("aria-label", `${title}, last ${series.length} seconds, highest ${shown(Math.max(...series), unit)} ${unit}`);
}

/** Counts per bucket in the chosen window: [{low, high, count}], cumulative counts already undone. */
function bucketsOf(name, now) {
  const seconds = Number(byId("live-window").value);
  const since = seconds && (scrapes.find((scraped) => now.at - scraped.at <= 1000 * seconds) || now);
  const cumulative = (metrics) => {
    const sums = new Map();
    for (const { labels, value } of metrics.get(`${name}_bucket`) || []) sums.set(labels.le, (sums.get(labels.le) || 0) + value);
    return sums;
  };
  const before = since ? cumulative(since.metrics) : new Map();
  let low = 0;
  let counted = 0;
  return [...cumulative(now.metrics)].map(([le, sum]) => {
    const high = le === "+Inf" ? Infinity : Number(le);
    const upTo = sum - (before.get(le) || 0);
    const bucket = { low, high, count: Math.max(0, upTo - counted) };
    low = high;
    counted = upTo;
    return bucket;
  });
}

/** The value below which a share of the observations lies, spread evenly inside each bucket, as histogram_quantile does. */
function quantile(buckets, share) {
  let rank = share * buckets.reduce((sum, bucket) => sum + bucket.count, 0);
  for (const { low, high, count } of buckets) {
    if (count && rank <= count) return high === Infinity ? low : low + ((high - low) * rank) / count;
    rank -= count;
  }
  return 0;
}

const duration = (seconds) => {
  if (seconds < 0.9995) return `${Number((1000 * seconds).toPrecision(3))} ms`;
  return `${Number(seconds.toPrecision(3))} s`;
};

function drawHistogram(chart, { name, title }, now) {
  const buckets = bucketsOf(name, now);
  const count = buckets.reduce((sum, bucket) => sum + bucket.count, 0);
  const marks = chart.querySelector(".marks");
  const bars = chart.querySelector(".bars");
  if (!count) {
    marks.textContent = "nothing measured yet";
    bars.replaceChildren(drawing("line", { x1: 0, y1: 112, x2: 300, y2: 112 }));
    bars.setAttribute("aria-label", `${title}: nothing measured yet`);
    return;
  }
  const facts = [["p50", 0.5], ["p90", 0.9], ["p99", 0.99]].map(([label, share]) => [label, duration(quantile(buckets, share))]);
  marks.replaceChildren(...facts.map(([label, value]) => make("span", {}, `${label} `, make("b", { textContent: value }))), make("span", { textContent: `${grouped(count)} measured` }));
  bars.setAttribute("aria-label", `${title}: ${facts.map(([label, value]) => `${label} ${value}`).join(", ")}, ${count} measured`);
  // One empty bucket on each side says where the values end.
  const first = Math.max(0, buckets.findIndex((bucket) => bucket.count) - 1);
  const last = Math.min(buckets.length - 1, buckets.findLastIndex((bucket) => bucket.count) + 1);
  const visible = buckets.slice(first, Math.max(last + 1, first + 4));
  bars.replaceChildren(...barsOf(visible));
}

function barsOf(buckets) {
  const tallest = Math.max(...buckets.map((bucket) => bucket.count));
  const width = 300 / buckets.length;
  const made = [drawing("line", { x1: 0, y1: 112, x2: 300, y2: 112 })];
  const step = Math.ceil(buckets.length / 6);
  buckets.forEach(({ low, high, count }, index) => {
    const height = count ? Math.max(2, (104 * count) / tallest) : 0;
    const range = high === Infinity ? `above ${duration(low)}` : `${duration(low)} to ${duration(high)}`;
    made.push(drawing("rect", { x: (index * width + 1.5).toFixed(2), y: (112 - height).toFixed(2), width: (width - 3).toFixed(2), height: height.toFixed(2), rx: 2 },
      titled(`${range}: ${grouped(count)}`)));
    // A label sits under the border between its bar and the next.
    if (high !== Infinity && index < buckets.length - 1 && index % step === 0) {
      const label = drawing("text", { x: ((index + 1) * width).toFixed(2), y: 126 });
      label.textContent = duration(high);
      made.push(label);
    }
  });
  return made;
}

function titled(text) {
  const made = drawing("title", {});
  made.textContent = text;
  return made;
}

function drawCounts(metrics) {
  const rows = (metrics.get("vllm:request_success_total") || []).map(({ labels, value }) => [`ended: ${labels.finished_reason}`, value]);
  rows.push(["preemptions", total(metrics, "vllm:num_preemptions_total")]);
  rows.push(["refused at the queue limit", total(metrics, "vllm:admission_rejections_total")]);
  byId("counts").replaceChildren(...rows.map(([name, value]) => make("tr", {}, make("th", { scope: "row", textContent: name }), make("td", { textContent: grouped(value) }))));
}
