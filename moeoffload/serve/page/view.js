// Asks for the figures once a second and shows them.
const POLL_MS = 1000, PATIENCE_MS = 5000, SPARK_S = 300;
const RESULTS = ["finished", "cancelled", "failed", "rejected"];
const MARKS = { up: "●", replaced: "◐", lost: "✕" };
const HINTS = ["attention, router, head", "rows into frames", "on the way", "waiting at servers", "experts on servers",
  "experts on this host", "adding up", "sampling, scheduling"];
const STATES = { up: "up", replaced: "replaced", lost: "lost" };
const KEY_NAME = "moeoffload-key";

let latest = null, points = [], key = firstKey(), answeredAt = 0, inSequence = null, timer = 0, asking = false;

// From the address, where it does not stay: neither in the list of visited pages nor in a picture of the screen.
function firstKey() {
  const given = new URLSearchParams(location.search).get("key")
    || new URLSearchParams(location.hash.slice(1)).get("key");
  try {
    if (given) {
      sessionStorage.setItem(KEY_NAME, given);
      history.replaceState(null, "", location.pathname);
    }
    return given || sessionStorage.getItem(KEY_NAME) || "";
  } catch {
    return given || "";
  }
}

async function ask() {
  const controller = new AbortController();
  const limit = setTimeout(() => controller.abort(), PATIENCE_MS);
  try {
    const headers = key ? { Authorization: "Bearer " + key } : {};
    const reply = await fetch("stats", { headers, cache: "no-store", signal: controller.signal });
    if (reply.status === 401 || reply.status === 403) return unwanted();
    if (!reply.ok) throw new Error("it answers " + reply.status);
    const snapshot = await reply.json();
    answeredAt = Date.now();
    if (latest && snapshot.uptime_s < latest.uptime_s) points = [];  // the host has started again
    latest = snapshot;
    show(snapshot, snapshot.now);
  } catch (error) {
    unreachable(error instanceof TypeError || error.name === "AbortError" ? "" : error.message);
  } finally {
    clearTimeout(limit);
  }
}

async function poll() {
  if (asking) return;
  asking = true;
  clearTimeout(timer);
  await ask();
  asking = false;
  // A hidden page asks for nothing: a host times its layers only while figures are asked for.
  if (!document.hidden) timer = setTimeout(poll, POLL_MS);
}

function status(kind, text) {
  $("status").className = "pill " + kind;
  say($("status"), text);
}

function notice(text) {
  $("notice").hidden = !text;
  say($("notice"), text);
  $("main").classList.toggle("stale", Boolean(text));
}

function unwanted() {
  status("bad", "✕ key needed");
  notice(key ? "The server does not take this key." : "");
  $("key-form").hidden = false;
}

function unreachable(why) {
  status("bad", "✕ not reachable");
  const since = answeredAt
    ? "for " + span((Date.now() - answeredAt) / 1000) + "; the figures below are from " + new Date(answeredAt).toLocaleTimeString()
    : "yet";
  notice("The server cannot be reached " + since + (why ? " (" + why + ")" : "") + ". Trying again every second.");
}

function show(now, f) {
  const { requests, model } = now, busy = requests.running + requests.waiting;
  const away = now.servers.filter((server) => server.state !== "up").length;
  $("key-form").hidden = true;
  $("main").hidden = false;
  notice("");
  if (!busy) status("calm", "○ idle: nothing runs");
  else status("good", "● live");
  if (away) status("warn", "◐ " + (busy ? "live" : "idle") + ", " + away + " of " + now.servers.length + " servers away");
  say($("model"), [model.name, model.type, model.dtype, model.layers + " MoE layers", "up " + span(now.uptime_s),
    "version " + now.version].join(" · "));
  showSpeed(now, f);
  for (const name of ["running", "waiting", ...RESULTS]) {
    say($(name), whole(requests[name]));
    $(name).classList.toggle("alarm", name === "failed" && requests.failed > 0);
  }
  showLatency(f);
  showCache(now.cache, f);
  showStep(f);
  showLayers(f.layers);
  showServers(now.servers.map((server, i) => ({ server, ...f.servers[i] })));
  say($("rows-per-step"), number(f.rows_per_step));
  bars($("rows"), f.rows);
  showMembers(f);
  showFaults(now);
}

function showSpeed(now, f) {
  say($("tokens-per-s"), number(f.tokens_per_s));
  say($("prompt-per-s"), number(f.prompt_tokens_per_s));
  say($("steps-per-s"), number(f.steps_per_s));
  points = points.filter(([at]) => at > now.uptime_s - SPARK_S && at < now.uptime_s);
  if (f.watched_s > 0) points.push([now.uptime_s, f.tokens_per_s]);
  $("spark").parentNode.hidden = !points.length;
  if (!points.length) return;
  const width = Math.min(SPARK_S, Math.max(60, now.uptime_s - points[0][0]));
  const most = sparkline($("spark"), points, width);
  say($("spark-from"), span(width) + " ago");
  say($("spark-most"), "highest " + number(most < 1e-6 ? 0 : most));
}

function showLatency(f) {
  [["ttft", f.first_token_s], ["itl", f.between_tokens_s]].forEach(([name, [p50, p95]]) => {
    say($(name + "-p50"), seconds(p50));
    say($(name + "-p95"), seconds(p95));
  });
  const [first, between] = [f.first_token_all_s, f.between_tokens_all_s].map((all) => all.map(seconds).join(" / "));
  say($("latency-all"), "since the start " + first + " · " + between);
}

function showCache(cache, f) {
  say($("cache-use"), percent(f.cache_use));
  say($("cache-bytes"), "of " + memory(cache.total_bytes));
  stack($("cache-meter"), [
    { name: "used", value: cache.used_tokens, text: "in use: " + whole(cache.used_tokens) + " tokens" },
    { name: "kept", value: cache.kept_tokens, text: "kept for reuse: " + whole(cache.kept_tokens) + " tokens" },
  ], cache.total_tokens || 1);
  say($("cache-text"), whole(cache.used_tokens) + " in use, " + whole(cache.kept_tokens) + " kept, of "
    + whole(cache.total_tokens) + " tokens");
  say($("reuse"), percent(f.reuse));
}

function showStep(f) {
  say($("step"), seconds(f.step_s));
  const total = sum(PARTS.map((part) => f.step_parts[part])), most = Math.max(total, f.step_s || 0) || 1;
  stack($("step-bar"), PARTS.map((name) => ({ name, value: f.step_parts[name], text: name + " " + seconds(f.step_parts[name]) })), most);
  fill($("step-parts").tBodies[0], PARTS, (i) => {
    const row = make("tr"), head = make("th");
    head.scope = "row";
    head.append(make("i", "swatch p-" + PARTS[i]), PARTS[i], make("span", "soft", HINTS[i]));
    row.append(head, make("td"), make("td"));
    row.children[1].id = "part-" + PARTS[i];
    return row;
  }, (row, name) => {
    say(row.children[1], f.step_s === null ? "–" : seconds(f.step_parts[name]));
    say(row.children[2], f.step_s === null ? "–" : percent(f.step_parts[name] / most));
  });
}

function showLayers(layers) {
  $("layers").hidden = $("layout").hidden = !layers.length;
  say($("no-layers"), layers.length ? "" : "No layer was timed: no step has run while this page looked.");
  if (!layers.length) return;
  if (inSequence === null) inSequence = layers.length <= 12;
  say($("layout"), inSequence ? "Align at the left" : "Show in sequence");
  const height = layers.length <= 8 ? 36 : layers.length <= 16 ? 20 : layers.length <= 32 ? 12 : layers.length <= 64 ? 8 : 5;
  const every = Math.ceil(14 / height);
  $("fall").style.height = $("layer-names").style.height = height * layers.length + "px";
  fill($("layer-names"), layers, () => make("span"), (name, _, i) => say(name, i % every ? "" : String(i)));
  const most = waterfall($("fall"), layers, inSequence);
  fill($("axis"), ticks(most), () => make("span"), (mark, at) => {
    mark.style.left = 100 * at / most + "%";
    say(mark, tick(at));
  });
  const mean = Object.fromEntries(LAYER_PARTS.map((part) => [part, sum(layers.map((layer) => layer[part])) / layers.length]));
  $("fall").setAttribute("aria-label", layers.length + " layers; mean of a layer: "
    + LAYER_PARTS.map((part) => part + " " + seconds(mean[part])).join(", "));
  fill($("legend"), LAYER_PARTS, (i) => {
    const item = make("span");
    item.append(make("i", "swatch p-" + LAYER_PARTS[i]), LAYER_PARTS[i]);
    return item;
  }, () => {});
  fill($("layer-table").tHead, [0], () => {
    const row = make("tr");
    row.append(...["layer", ...LAYER_PARTS].map((name) => make("th", "", name)));
    return row;
  }, () => {});
  fill($("layer-table").tBodies[0], layers, (i) => {
    const row = make("tr");
    row.append(make("th", "", String(i)), ...LAYER_PARTS.map(() => make("td")));
    return row;
  }, (row, layer) => LAYER_PARTS.forEach((part, i) => say(row.children[i + 1], seconds(layer[part]))));
}

function showServers(loads) {
  $("no-servers").hidden = loads.length > 0;
  $("servers").hidden = !loads.length;
  fill($("servers").tBodies[0], loads, () => {
    const row = make("tr");
    row.append(make("th"), ...Array.from({ length: 9 }, () => make("td")));
    [...$("servers").tHead.rows[0].cells].forEach((head, i) => { row.children[i].dataset.label = i > 1 ? head.textContent : ""; });
    row.children[0].scope = "row";
    row.children[2].append(make("i", "busy"), make("span"));
    row.children[2].firstChild.append(make("b"));
    return row;
  }, (row, { server, busy, calls_per_s, rows_per_s, bytes_per_s, wait_s }) => {
    say(row.children[0], server.address);
    row.children[1].className = "state " + (STATES[server.state] || "lost");
    say(row.children[1], (MARKS[server.state] || "?") + " " + server.state
      + (server.state === "replaced" ? " by " + server.computed_by : ""));
    row.children[2].firstChild.firstChild.style.width = 100 * busy + "%";
    say(row.children[2].lastChild, percent(busy));
    [number(calls_per_s), number(rows_per_s), number(bytes_per_s / MIB), seconds(wait_s), whole(server.n_experts),
      memory(server.resident_bytes), [server.device, server.kernel, server.transport].join(", ")]
      .forEach((text, i) => say(row.children[i + 3], text));
  });
}

function showMembers(f) {
  $("members").hidden = !f.batch_members;
  say($("members-per-batch"), f.batch_members ? number(f.members_per_batch) : "not told by the servers");
  if (f.batch_members) bars($("members"), f.batch_members);
}

function showFaults(now) {
  const counts = Object.entries(now.recovery).filter(([name]) => name !== "events");
  fill($("recovery"), counts, () => {
    const pair = make("div");
    pair.append(make("dt"), make("dd"));
    return pair;
  }, (pair, [name, count]) => {
    say(pair.firstChild, name.replaceAll("_", " "));
    say(pair.lastChild, whole(count));
  });
  fill($("events"), (now.recovery.events || []).slice(-4).reverse(), () => make("li"), (item, event) =>
    say(item, event.server + " " + event.what + ": " + event.why));
}

$("layout").addEventListener("click", () => {
  inSequence = !inSequence;
  showLayers(latest.now.layers);
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  try { sessionStorage.setItem(KEY_NAME, key); } catch { /* then it lasts as long as the page */ }
  poll();
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) poll(); });
status("calm", "○ asking the server");
poll();
