// SPDX-License-Identifier: Apache-2.0
// One event stream for all tabs: browsers open six connections a host, and ten open dashboards must not use them up.
// The tab that holds the lock reads the stream and passes it on over a BroadcastChannel; when it closes, the lock goes
// to another tab, which resumes after the last event seen. Web Locks are for secure contexts only: over plain http on
// another host the tabs choose the reader among themselves (elect).
import type { RunEvent } from "./types.ts";

export type LiveState = "connecting" | "live" | "lost";
type Message = { kind: "claim"; tab: string } | { kind: "leave"; tab: string } | { kind: "event"; event: RunEvent } | { kind: "state"; state: LiveState } | { kind: "ask" } | { kind: "reset"; id: number };

const RETRY_MS = 2000;
const SILENCE_MS = 40000; // the server sends something at least every 15 s

const eventListeners = new Set<(event: RunEvent | null) => void>();
const stateListeners = new Set<(state: LiveState) => void>();
let state: LiveState = "connecting";
let lastId = 0;
let channel: BroadcastChannel | null = null;
let leading = false;

function setState(next: LiveState): void {
  if (next === state) return;
  // What happened while nobody listened is not known: everyone reads afresh.
  const healed = state === "lost" && next === "live";
  state = next;
  for (const listener of stateListeners) listener(state);
  if (healed) deliver(null);
}

function deliver(event: RunEvent | null): void {
  if (event) {
    if (event.id <= lastId) return;
    lastId = event.id;
  }
  for (const listener of eventListeners) listener(event);
}

function share(message: Message): void {
  channel?.postMessage(message);
}

let stopReading: (() => void) | null = null;

function follow(): void {
  leading = false;
  stopReading?.();
  stopReading = null;
}

function lead(): void {
  leading = true;
  let source: EventSource | null = null;
  let heard = Date.now();
  const connect = (): void => {
    source?.close();
    heard = Date.now();
    source = new EventSource(lastId ? `api/v1/events?since=${lastId}` : "api/v1/events");
    const alive = (): void => {
      heard = Date.now();
      setState("live");
      share({ kind: "state", state: "live" });
    };
    source.onopen = alive;
    source.addEventListener("ping", alive);
    source.addEventListener("reset", (message) => {
      lastId = Number((message as MessageEvent<string>).lastEventId) || 0;
      deliver(null);
      share({ kind: "reset", id: lastId });
    });
    source.addEventListener("run", (message) => {
      alive();
      const event = JSON.parse((message as MessageEvent<string>).data) as RunEvent;
      deliver(event);
      share({ kind: "event", event });
    });
    source.onerror = () => {
      setState("lost");
      share({ kind: "state", state: "lost" });
      // The browser retries by itself unless the answer was an error status; then it gives up and we go on.
      if (source?.readyState === EventSource.CLOSED) window.setTimeout(() => leading && connect(), RETRY_MS);
    };
  };
  connect();
  const timer = window.setInterval(() => {
    if (Date.now() - heard > SILENCE_MS) connect();
  }, 5000);
  stopReading = () => {
    window.clearInterval(timer);
    source?.close();
    source = null;
  };
}

// Each tab that wants to read says so once a beat; the smallest name among those heard of lately reads. Two may read for
// a moment, which does no harm (events have ids); none reads for at most LEASE_MS.
const BEAT_MS = 1000;
const LEASE_MS = 3500;
const heardOf = new Map<string, number>();
const tab = `${Date.now().toString(36).padStart(9, "0")}-${Math.random().toString(36).slice(2, 10)}`;

// Whether this tab should read: no tab with a smaller name (an older one) has been heard of within the lease.
export function isElected(own: string, others: ReadonlyMap<string, number>, now: number): boolean {
  for (const [name, at] of others) if (name < own && now - at < LEASE_MS) return false;
  return true;
}

function elect(): void {
  const since = Date.now();
  const beat = (): void => {
    share({ kind: "claim", tab });
    const elected = isElected(tab, heardOf, Date.now());
    if (elected && !leading && Date.now() - since >= 2 * BEAT_MS) lead();
    else if (!elected && leading) follow();
  };
  window.addEventListener("pagehide", () => share({ kind: "leave", tab }));
  beat();
  window.setInterval(beat, BEAT_MS);
}

export function startLive(): void {
  if (typeof BroadcastChannel === "function") {
    // One channel per folder: two sidecars behind one host name must not mix.
    channel = new BroadcastChannel("paramsync:" + new URL(".", location.href).pathname);
    channel.onmessage = (message: MessageEvent<Message>) => {
      const data = message.data;
      if (data.kind === "event") deliver(data.event);
      else if (data.kind === "state") setState(data.state);
      else if (data.kind === "reset") {
        lastId = data.id; // a store that was replaced counts anew
        deliver(null);
      }
      else if (data.kind === "claim") {
        heardOf.set(data.tab, Date.now());
        // A hidden tab's timers are slowed down, its messages are not: it keeps its place by answering.
        if (tab < data.tab) share({ kind: "claim", tab });
      }
      else if (data.kind === "leave") heardOf.delete(data.tab);
      else if (leading) share({ kind: "state", state });
    };
  }
  if (channel && navigator.locks) {
    share({ kind: "ask" });
    void navigator.locks.request("paramsync-stream:" + new URL(".", location.href).pathname, () => {
      lead();
      return new Promise<void>(() => undefined); // held until the tab closes
    });
  } else if (channel) {
    share({ kind: "ask" });
    elect();
  } else {
    lead();
  }
}

// event null: events may have been missed, read everything again. Returns how to stop.
export function onEvent(listener: (event: RunEvent | null) => void): () => void {
  eventListeners.add(listener);
  return () => eventListeners.delete(listener);
}

export function onLiveState(listener: (state: LiveState) => void): () => void {
  stateListeners.add(listener);
  listener(state);
  return () => stateListeners.delete(listener);
}
