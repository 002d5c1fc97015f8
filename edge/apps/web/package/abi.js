/** Numbers and structs of edge.h, written by `python -m edge.apps.bindings`. */

/** Statuses of edge.h, as codes of EdgeError. */
export const CODES = {
  // generated: Status
  [-1]: "bad-argument", [-2]: "bad-file", [-3]: "unsupported", [-4]: "no-memory", [-5]: "busy", [-6]: "full",
  [-7]: "failed"
  // end
};

/** C's names in messages of the module, and what they are here. @type {Record<string, string>} */
export const NAMES = {
  // generated: Names
  "edge_open": "Edge.open",
  "edge_begin": "Edge.open",
  "edge_append": "stream",
  "edge_next": "stream",
  "edge_cancel": "signal",
  "edge_embed": "embed",
  "edge_image": "image",
  "edge_sound": "sound",
  "edge_picture": "picture",
  "edge_listen": "transcribe",
  "edge_hear": "transcribe",
  "edge_constrain": "constrain",
  "edge_bias": "bias",
  "edge_tools": "tools",
  "edge_choose": "choose",
  "EDGE_FREE": "null",
  "edge_role": "role",
  "edge_form": "form",
  "edge_options.npu": "npu",
  "EDGE_RAW": "the role 'raw'",
  "EDGE_USER": "the role 'user'",
  // end
};

/** edge_finish, by its numbers. */
export const FINISHES = [
  // generated: Finish
  "going", "eos", "stop", "length", "capacity", "interrupted", "time", "energy", "power", "thermal", "memory",
  "tool-calls"
  // end
];

/** edge_role. */
export const ROLES = {
  // generated: Role
  system: 0, user: 1, assistant: 2, raw: 3, ids: 4, result: 5
  // end
};

/** edge_form. */
export const FORMS = {
  // generated: Form
  free: 0, jsonSchema: 1, regex: 2
  // end
};

/** @typedef {[name: string, type: string, at: number, otherwise?: number][]} Fields of a struct: `at` is in bytes */

/** edge_options, with defaults of missing fields. @type {Fields} */
export const OPTIONS = [
  // generated: Options
  ["threads", "Uint32", 4, 0], ["temperature", "Float64", 24, -1], ["topK", "Int32", 32, -1],
  ["topP", "Float64", 40, -1], ["minP", "Float64", 48, -1], ["repeatPenalty", "Float64", 56, -1],
  ["seeded", "Flag", 64, 0], ["seed", "BigUint64", 72, 0], ["presencePenalty", "Float64", 80, 0],
  ["frequencyPenalty", "Float64", 88, 0], ["dryMultiplier", "Float64", 96, 0], ["dryBase", "Float64", 104, -1],
  ["dryAllowedLength", "Int32", 112, -1], ["dryLastN", "Int32", 116, -1], ["xtcProbability", "Float64", 120, 0],
  ["xtcThreshold", "Float64", 128, -1], ["maxTokens", "Uint32", 136, 0], ["speculate", "Uint32", 140, 0],
  ["ignoreEos", "Flag", 144, 0], ["time", "Float64", 160, 0], ["energy", "Float64", 168, 0],
  ["power", "Float64", 176, 0],
  // end
];

/** edge_model_info. @type {Fields} */
export const INFO = [
  // generated: ModelInfo
  ["name", "Text", 8], ["license", "Text", 12], ["policy", "Text", 16], ["kvDtype", "Text", 20], ["isa", "Text", 24],
  ["vocab", "Uint32", 28], ["context", "Uint32", 32], ["capacity", "Uint32", 36], ["threads", "Uint32", 40],
  ["chat", "Flag", 44], ["weights", "BigUint64", 48], ["kv", "BigUint64", 56], ["scratch", "BigUint64", 64],
  ["loraRank", "Uint32", 72], ["dimensions", "Uint32", 76],
  // end
];

/** edge_hearing, with defaults of missing fields. @type {Fields} */
export const HEARING = [
  // generated: Hearing
  ["rate", "Uint32", 4, 0], ["translate", "Flag", 12, 0], ["temperature", "Float64", 24, -1],
  ["everything", "Flag", 32, 0], ["alone", "Flag", 36, 0], ["live", "Flag", 40, 0], ["words", "Flag", 44, 0],
  // end
];

/** edge_segment. @type {Fields} */
export const SEGMENT = [
  // generated: Segment
  ["id", "Uint32", 4], ["finish", "Uint32", 8], ["text", "Text", 12], ["start", "Float64", 24], ["end", "Float64", 32],
  ["language", "Text", 40], ["words", "Text", 44], ["temperature", "Float64", 56], ["avgLogprob", "Float64", 64],
  ["compressionRatio", "Float64", 72], ["noSpeechProb", "Float64", 80], ["heard", "Float64", 88],
  // end
];

/** edge_usage. @type {Fields} */
export const USAGE = [
  // generated: Usage
  ["rows", "Uint32", 4], ["capacity", "Uint32", 8], ["threads", "Uint32", 12], ["weights", "BigUint64", 16],
  ["kv", "BigUint64", 24], ["scratch", "BigUint64", 32], ["lora", "BigUint64", 40], ["file", "BigUint64", 48],
  ["tokens", "BigUint64", 72], ["evicted", "BigUint64", 80], ["drafted", "BigUint64", 88],
  ["accepted", "BigUint64", 96], ["joules", "Float64", 104], ["seconds", "Float64", 112], ["measured", "Flag", 120],
  ["gain", "Float64", 144], ["encoder", "BigUint64", 152], ["pictures", "BigUint64", 160],
  ["pictureJoules", "Float64", 168], ["pictureSeconds", "Float64", 176],
  // end
];
