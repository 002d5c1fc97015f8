import CEdge
import Foundation

/// Options of a session, as `edge run` has them.
public struct EdgeOptions: Sendable {
    // generated: Options
    /// CPU threads. Nil: the cores of the fastest cluster, as far as the bundle has room for them.
    public var threads: UInt32?
    /// Instruction set, such as dotprod; read when a session begins only. Nil: the best of this CPU.
    public var isa: String?
    /// 0 is greedy: the same answer every time. Nil: as the model recommends.
    public var temperature: Double?
    /// Draw from the k likeliest; 0 is off. Nil: as the model recommends.
    public var topK: Int32?
    /// Draw from the likeliest that make up p; 1 is off. Nil: as the model recommends.
    public var topP: Double?
    /// Drop tokens below p times the likeliest; 0 is off. Nil: as the model recommends.
    public var minP: Double?
    /// Penalty on the last 64 tokens; 1 is off. Nil: as the model recommends.
    public var repeatPenalty: Double?
    /// Seed of the draws. Nil: a new one for every answer.
    public var seed: UInt64?
    /// Tokens to generate. Nil: no limit.
    public var maxTokens: UInt32?
    /// Never end the turn; go on.
    public var ignoreEos = false
    /// Texts before which an answer ends: 16 of 128 bytes at most.
    public var stop: [String] = []
    /// Seconds that an answer and the prompt before it may take. Nil: no limit.
    public var time: Double?
    /// Joules that an answer and the prompt before it may cost, estimated without readings. Nil: no limit.
    public var energy: Double?
    /// Watts on average, estimated without readings; held by pauses. Nil: no limit.
    public var power: Double?
    /// Degrees Celsius that the processor may have, by readings; held by pauses. Nil: no limit.
    public var maxTemp: Double?
    /// Thermal headroom that may be used up, by readings, as Android counts: 1 is where the system throttles; held by
    /// pauses. Nil: no limit.
    public var headroom: Double?
    // end

    public init() {}

    func withNative<Value>(_ body: (inout edge_options) throws -> Value) throws -> Value {
        let texts = stop.map { strdup($0) }
        let isaText = isa.flatMap { strdup($0) }
        defer {
            texts.forEach { free($0) }
            free(isaText)
        }
        return try texts.map { UnsafePointer<CChar>($0) }.withUnsafeBufferPointer { pointers in
            var native = edge_options()
            native.size = UInt32(MemoryLayout<edge_options>.size)
            native.isa = UnsafePointer<CChar>(isaText)
            native.stop = pointers.baseAddress
            native.stop_count = UInt32(pointers.count)
            // generated: OptionsNative
            native.threads = threads ?? 0
            native.temperature = temperature ?? -1
            native.top_k = topK ?? -1
            native.top_p = topP ?? -1
            native.min_p = minP ?? -1
            native.repeat_penalty = repeatPenalty ?? -1
            native.seeded = seed == nil ? 0 : 1
            native.seed = seed ?? 0
            native.max_tokens = maxTokens ?? 0
            native.ignore_eos = ignoreEos ? 1 : 0
            native.time = time ?? 0
            native.energy = energy ?? 0
            native.power = power ?? 0
            native.max_temp = maxTemp ?? 0
            native.headroom = headroom ?? 0
            // end
            return try body(&native)
        }
    }
}

/// Who speaks.
public enum Role: Int32, Sendable {
    // generated: Role
    /// Before the first turn. Its KV rows stay when others are evicted, as far as the plan has room.
    case system
    /// A turn. Its text never becomes a control token.
    case user
    /// An answer from an earlier conversation.
    case assistant
    /// Text without the chat template, in which control tokens are recognized.
    case raw
    // end
}

/// Why an answer ended, in the order of edge.h.
public enum Finish: Int32, Sendable {
    // generated: Finish
    case going, eos, stop, length, capacity, interrupted, time, energy, power, thermal, memory
    // end
}

/// A part of an answer: whole characters, perhaps none. `token` is -1 for the rest of a text.
public struct Piece: Sendable {
    public let text: String
    public let token: Int32
    public let finish: Finish
}

/// How much memory a trim gives back: what costs nothing, half of what can be spared, all of it.
public enum Trim: Int32, Sendable {
    // generated: Trim
    case soft, half, all
    // end
}

/// What the app measures; nil: not known.
public struct Readings: Sendable {
    // generated: Readings
    /// Consumed since a fixed moment. Read them before a prompt, too: what is spent since is estimated.
    public var joules: Double?
    /// Temperature of the processor.
    public var celsius: Double?
    /// Android's thermal headroom: 1 is where the system throttles.
    public var headroom: Double?
    /// Bytes that this process may still take.
    public var available: Int64?
    // end

    public init() {}

    var native: edge_readings {
        var native = edge_readings()
        native.size = UInt32(MemoryLayout<edge_readings>.size)
        // generated: ReadingsNative
        native.joules = joules ?? -1
        native.celsius = celsius ?? -1
        native.headroom = headroom ?? -1
        native.available = available ?? -1
        // end
        return native
    }
}

/// What a model and its plan are.
public struct ModelInfo: Sendable {
    // generated: ModelInfo
    public let name: String
    public let license: String
    /// By which KV rows are evicted.
    public let policy: String
    /// Type of KV rows.
    public let kvDtype: String
    /// The best instruction set of this CPU.
    public let isa: String
    /// Tokens.
    public let vocab: Int
    /// Positions that the model has learned.
    public let context: Int
    /// KV rows.
    public let capacity: Int
    /// The most threads of a session.
    public let threads: Int
    /// Whether there is a chat template.
    public let chat: Bool
    /// Bytes of weights; as the next two, planned for one session.
    public let weights: UInt64
    /// Bytes of KV rows.
    public let kv: UInt64
    /// Bytes of scratch memory.
    public let scratch: UInt64
    // end

    init(_ native: edge_model_info) {
        // generated: ModelInfoRead
        name = String(cString: native.name)
        license = String(cString: native.license)
        policy = String(cString: native.policy)
        kvDtype = String(cString: native.kv_dtype)
        isa = String(cString: native.isa)
        vocab = Int(native.vocab)
        context = Int(native.context)
        capacity = Int(native.capacity)
        threads = Int(native.threads)
        chat = native.chat != 0
        weights = native.weights
        kv = native.kv
        scratch = native.scratch
        // end
    }
}

/// What a session has used.
public struct Usage: Sendable {
    // generated: Usage
    /// Rows of the KV cache in use.
    public let rows: Int
    /// Rows that the cache has.
    public let capacity: Int
    public let threads: Int
    /// Bytes of weights.
    public let weights: UInt64
    /// Bytes of KV rows.
    public let kv: UInt64
    /// Bytes of scratch memory.
    public let scratch: UInt64
    /// Bytes of model.edge that are mapped.
    public let file: UInt64
    /// Tokens that ran since the session began.
    public let tokens: UInt64
    /// Rows that the policy evicted.
    public let evicted: UInt64
    /// Of the last answer and its prompt, as are the seconds.
    public let joules: Double
    public let seconds: Double
    /// Whether the app read the joules; otherwise they are estimated.
    public let measured: Bool
    // end

    init(_ native: edge_usage) {
        // generated: UsageRead
        rows = Int(native.rows)
        capacity = Int(native.capacity)
        threads = Int(native.threads)
        weights = native.weights
        kv = native.kv
        scratch = native.scratch
        file = native.file
        tokens = native.tokens
        evicted = native.evicted
        joules = native.joules
        seconds = native.seconds
        measured = native.measured != 0
        // end
    }
}

/// Why a call failed. The message is one line that says what was wrong and what to do.
public struct EdgeError: Error, LocalizedError, Sendable {
    public enum Code: Int32, Sendable {
        // generated: Status
        case badArgument = -1, badFile = -2, unsupported = -3, noMemory = -4, busy = -5, full = -6, failed = -7
        // end
    }

    public let code: Code
    public let message: String
    public var errorDescription: String? { message }

    static func check(_ call: (inout edge_error) -> Int32) throws {
        var error = edge_error()
        error.size = UInt32(MemoryLayout<edge_error>.size)
        let status = call(&error)
        guard status < 0 else { return }
        let message = withUnsafeBytes(of: error.message) { String(decoding: $0.prefix { $0 != 0 }, as: UTF8.self) }
        throw EdgeError(code: Code(rawValue: status) ?? .failed, message: message)
    }
}
