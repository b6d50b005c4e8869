// SPDX-License-Identifier: Apache-2.0
import type { Confusion } from "./confusion.ts";
import { t } from "./i18n.ts";
import { serverText } from "./server.ts";
import type { Checkpoint, Comparison, Ranks, Run, RunEvent, RunList, SeriesAnswer, Status } from "./types.ts";

// Sent to the window when the sidecar no longer takes what we show it (a new token, a new browser).
export const LOGIN_NEEDED = "paramsync-login-needed";

export class ApiError extends Error {
  readonly status: number;
  readonly code: string;
  constructor(status: number, code: string, message: string) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// Every path is relative to the page, so that the dashboard works under any sub-path.
async function get<T>(path: string, signal?: AbortSignal): Promise<T> {
  return call(path, signal ? { signal } : {});
}

async function call<T>(path: string, options: RequestInit): Promise<T> {
  const signal = options.signal;
  let response: Response;
  try {
    response = await fetch("api/v1/" + path, options);
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "UNAVAILABLE", t("unreachable"));
  }
  if (!response.ok) {
    let code = "UNKNOWN";
    let message = `HTTP ${response.status}`;
    try {
      const body = (await response.json()) as { error?: { code?: string; message?: string } };
      code = body.error?.code ?? code;
      message = body.error?.message ?? message;
    } catch {
      // Not our JSON (a proxy's page, say): the status has to do.
    }
    if (response.status === 401) window.dispatchEvent(new Event(LOGIN_NEEDED));
    throw new ApiError(response.status, code, serverText(message));
  }
  return (await response.json()) as T;
}

// What the caller may do; the server decides again on each change.
export type Role = "read" | "write" | "admin";
let role: Role = "admin";
export const canWrite = (wanted: Role): boolean => ["read", "write", "admin"].indexOf(role) >= ["read", "write", "admin"].indexOf(wanted);
export const setRole = (next: Role): void => {
  role = next;
};

export interface Change {
  tags?: string[];
  notes?: string;
  baseline?: boolean;
}
export const changeRun = (run: string, change: Change): Promise<Run> =>
  call(`runs/${id(run)}`, { method: "PATCH", headers: { "Content-Type": "application/json" }, body: JSON.stringify(change) });
export const deleteRun = (run: string): Promise<{ bytes_freed: number }> => call(`runs/${id(run)}`, { method: "DELETE" });

export interface RunQuery {
  text?: string;
  state?: string;
  tag?: string;
  sort?: string;
  offset?: number;
  limit?: number;
  verdict?: boolean;
}

export function listRuns(query: RunQuery, signal?: AbortSignal): Promise<RunList> {
  const params = new URLSearchParams({ sort: query.sort ?? "-created", offset: String(query.offset ?? 0), limit: String(query.limit ?? 100) });
  if (query.text) params.set("q", query.text);
  if (query.state) params.set("state", query.state);
  if (query.tag) params.set("tag", query.tag);
  if (query.verdict) params.set("verdict", "1");
  return get(`runs?${params}`, signal);
}

export interface Info {
  version: string;
  target: number;
  grpc_port: number | null;
}

const id = encodeURIComponent;
export const getInfo = (signal?: AbortSignal): Promise<Info> => get("info", signal);
export const getRun = (run: string, signal?: AbortSignal): Promise<Run> => get(`runs/${id(run)}`, signal);
export const getEpochs = (run: string, signal?: AbortSignal): Promise<SeriesAnswer> => get(`runs/${id(run)}/series`, signal);
export interface Part {
  from?: number;
  to?: number;
  smooth?: number;
}
export const getSeries = (run: string, name: string, part: Part, signal?: AbortSignal): Promise<SeriesAnswer> =>
  get(`runs/${id(run)}/series?name=${id(name)}&rank=-1&max_points=2000${part.to ? `&from=${part.from ?? 0}&to=${part.to}` : ""}${part.smooth ? `&smooth=${part.smooth}` : ""}`, signal);
export interface LogLine {
  attempt: number;
  rank: number;
  seq: number;
  text: string;
}
export const getLog = (run: string, signal?: AbortSignal): Promise<{ lines: LogLine[] }> => get(`runs/${id(run)}/log?lines=60`, signal);
export const getStatus = (signal?: AbortSignal): Promise<Status> => get("status", signal);
export const getCheckpoints = (run: string, signal?: AbortSignal): Promise<{ checkpoints: Checkpoint[] }> =>
  get(`runs/${id(run)}/checkpoints`, signal);
// Null where there is none: nothing evaluated yet, or reported by a client that does not send it.
export async function getConfusion(run: string, signal?: AbortSignal): Promise<Confusion | null> {
  try {
    return await get<Confusion>(`runs/${id(run)}/confusion?epoch=best`, signal);
  } catch (error) {
    if (error instanceof ApiError && error.status === 404) return null;
    throw error;
  }
}
export const getRanks = (run: string, bins: number, signal?: AbortSignal): Promise<Ranks> => get(`runs/${id(run)}/ranks?bins=${bins}`, signal);
export const getEvents = (run: string, signal?: AbortSignal): Promise<{ events: RunEvent[] }> =>
  get(`runs/${id(run)}/events`, signal);
export const compareRuns = (runs: readonly string[], target: number, signal?: AbortSignal): Promise<Comparison> =>
  get(`compare?runs=${runs.map(id).join(",")}&target=${target}`, signal);

export async function login(token: string): Promise<boolean> {
  const response = await fetch("api/v1/session", { method: "POST", headers: { Authorization: `Bearer ${token}` } });
  if (response.ok) {
    setRole(((await response.json()) as { role?: Role }).role ?? "admin");
    return true;
  }
  if (response.status === 401) return false;
  throw new ApiError(response.status, "UNKNOWN", `HTTP ${response.status}`);
}
