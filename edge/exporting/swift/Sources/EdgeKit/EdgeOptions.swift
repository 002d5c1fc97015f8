import CEdge
import Foundation

/// Options of a session, as `edge run` has them. Nil leaves a choice to the model and its bundle.
public struct EdgeOptions: Sendable {
    /// The cores of the fastest cluster, unless given.
    public var threads: UInt32?
    /// Instruction set, such as "dotprod"; the best of the CPU, unless given. Read when a session begins only.
    public var isa: String?
    /// 0 is greedy.
    public var temperature: Double?
    public var topK: Int32?
    public var topP: Double?
    public var minP: Double?
    public var repeatPenalty: Double?
    /// A new one for every answer, unless given.
    public var seed: UInt64?
    /// Of an answer.
    public var maxTokens: UInt32?
    public var ignoreEos = false
    /// Texts before which an answer ends: at most 16, of at most 128 bytes in UTF-8.
    public var stops: [String] = []
    /// Budgets of an answer and the prompt before it. Joules and watts are estimated
    /// unless `sensors` read them; a limit of heat needs readings.
    public var seconds: Double?
    public var joules: Double?
    public var watts: Double?
    public var celsius: Double?
    /// 1 is where the system throttles; see `AppleSensors`.
    public var headroom: Double?

    public init() {}

    func withNative<Value>(_ body: (inout edge_options) throws -> Value) throws -> Value {
        let texts = stops.map { strdup($0) }
        let isaText = isa.flatMap { strdup($0) }
        defer {
            texts.forEach { free($0) }
            free(isaText)
        }
        return try texts.map { UnsafePointer<CChar>($0) }.withUnsafeBufferPointer { pointers in
            var native = edge_options()
            native.size = UInt32(MemoryLayout<edge_options>.size)
            native.threads = threads ?? 0
            native.isa = UnsafePointer<CChar>(isaText)
            native.temperature = temperature ?? -1
            native.top_k = topK ?? -1
            native.top_p = topP ?? -1
            native.min_p = minP ?? -1
            native.repeat_penalty = repeatPenalty ?? -1
            native.seeded = seed == nil ? 0 : 1
            native.seed = seed ?? 0
            native.max_tokens = maxTokens ?? 0
            native.ignore_eos = ignoreEos ? 1 : 0
            native.stops = pointers.baseAddress
            native.stop_count = UInt32(pointers.count)
            native.seconds = seconds ?? 0
            native.joules = joules ?? 0
            native.watts = watts ?? 0
            native.celsius = celsius ?? 0
            native.headroom = headroom ?? 0
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
    /// Consumed since a fixed moment.
    public var joules: Double?
    public var celsius: Double?
    /// 1 is where the system throttles.
    public var headroom: Double?
    /// Bytes that this process may still take.
    public var available: Int64?

    public init() {}
}

/// What a session has used. Bytes of memory; joules and seconds of the last answer and its prompt.
public struct Usage: Sendable {
    public let rows, capacity, threads: Int
    public let weights, kv, scratch, file, tokens, evicted: UInt64
    public let joules, seconds: Double
    public let measured: Bool // the joules: by the app's sensors, or else estimated
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
