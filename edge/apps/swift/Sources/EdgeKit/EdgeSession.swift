import CEdge
import Foundation

/// A conversation with a model.
///
/// All functions may be called from any thread: they run one after another on the session's queue, but for `cancel`.
/// Those without `async` wait for the token that is being generated.
public final class EdgeSession: @unchecked Sendable {
    private let model: EdgeModel // stays mapped as long as the session
    private let handle: OpaquePointer
    private let sensors: (@Sendable () -> Readings)?
    private let queue = DispatchQueue(label: "edge.session", qos: .userInitiated)
    // These belong to the queue.
    private var answers = 0
    private var lastRead = Date.distantPast
    private var ended: Finish?

    init(_ model: EdgeModel, _ options: EdgeOptions, _ sensors: (@Sendable () -> Readings)?) throws {
        var made: OpaquePointer?
        try options.withNative { native in
            try EdgeError.check { edge_begin(model.handle, &native, &made, &$0) }
        }
        guard let made else { throw EdgeError(code: .noMemory, message: "there is no memory for a session") }
        self.model = model
        self.handle = made
        self.sensors = sensors
    }

    deinit {
        edge_end(handle) // no call is running: each holds the session
    }

    /// Why the last answer ended; nil before the first, while one is generated, and after an error.
    public var finish: Finish? { queue.sync { ended } }

    /// Adds a text to the conversation; the next answer does most of the work.
    public func append(_ role: Role, _ text: String) throws {
        try queue.sync { try appendNow(role, text) }
    }

    /// The answer to a prompt as text, in whole characters.
    ///
    /// It is generated while it is read. It ends before its next token if the reading task is cancelled, and when another
    /// question is asked. `finish` is the reason of its end.
    public func answer(_ prompt: String) -> AsyncThrowingStream<String, Error> {
        let question = Question()
        return AsyncThrowingStream(unfolding: {
            while true {
                guard let piece = try await self.piece(of: question, prompt) else { return nil }
                if !piece.text.isEmpty { return piece.text }
                if piece.finish != .going { return nil }
            }
        })
    }

    /// From any thread: the answer ends before its next token, also while its prompt runs.
    public func cancel() {
        edge_cancel(handle)
    }

    /// Other options, from the next answer on.
    public func set(_ options: EdgeOptions) throws {
        try queue.sync {
            try options.withNative { native in try EdgeError.check { edge_set(handle, &native, &$0) } }
        }
    }

    /// Sets the form of the next and later answers: `text` is a JSON schema or a regular expression. An answer ends where
    /// its form does. If the form is refused, answers are free. Throws `.unsupported`, which names what cannot be enforced,
    /// `.badArgument` for a text that is malformed.
    public func constrain(_ form: Form, _ text: String = "") throws {
        try queue.sync {
            answers += 1
            try text.withCString { utf8 in
                try EdgeError.check { edge_constrain(handle, form.rawValue, utf8, text.utf8.count, &$0) }
            }
        }
    }

    /// Forgets the last turns, each a question with its answer; nil: all. Throws `.unsupported` where they cannot
    /// be taken back: after evictions. Then forget all, and append the conversation again.
    public func rewind(_ turns: UInt32?) throws {
        try queue.sync {
            answers += 1
            try EdgeError.check { edge_rewind(handle, turns ?? UInt32.max, &$0) }
        }
    }

    /// The conversation with its KV rows, for `load` in a session of the same bundle.
    public func save() throws -> Data {
        try queue.sync {
            var stream = edge_stream()
            stream.size = UInt32(MemoryLayout<edge_stream>.size)
            stream.fd = -1
            try EdgeError.check { edge_save(handle, &stream, &$0) }
            var state = Data(count: Int(stream.length))
            try state.withUnsafeMutableBytes { bytes in
                stream.buffer = bytes.baseAddress
                stream.capacity = UInt64(bytes.count)
                try EdgeError.check { edge_save(handle, &stream, &$0) }
            }
            return state
        }
    }

    public func load(_ state: Data) throws {
        var copy = state
        try queue.sync {
            answers += 1
            try copy.withUnsafeMutableBytes { bytes in
                var stream = edge_stream()
                stream.size = UInt32(MemoryLayout<edge_stream>.size)
                stream.fd = -1
                stream.buffer = bytes.baseAddress
                stream.capacity = UInt64(bytes.count)
                stream.length = UInt64(bytes.count)
                try EdgeError.check { edge_load(handle, &stream, &$0) }
            }
        }
    }

    /// Sets a LoRA adapter made by `edge export-adapter`; nil: none. `scale`: factor of its change. Forgets the whole
    /// conversation. Throws `.badFile` for adapters of other models, `.unsupported` if the bundle has no room for
    /// adapters (`info.loraRank`).
    public func setAdapter(_ adapter: Data?, scale: Double = 1) throws {
        try queue.sync {
            answers += 1
            guard var copy = adapter else {
                return try EdgeError.check { edge_set_adapter(handle, nil, scale, &$0) }
            }
            try copy.withUnsafeMutableBytes { bytes in
                var stream = edge_stream()
                stream.size = UInt32(MemoryLayout<edge_stream>.size)
                stream.fd = -1
                stream.buffer = bytes.baseAddress
                stream.capacity = UInt64(bytes.count)
                try EdgeError.check { edge_set_adapter(handle, &stream, scale, &$0) }
            }
        }
    }

    /// Returns memory to the system, also between two tokens of an answer; its rows are lost for good.
    public func trim(_ level: Trim) throws {
        try EdgeError.check { edge_trim(handle, level.rawValue, &$0) }
    }

    public func usage() -> Usage {
        queue.sync {
            var use = edge_usage()
            use.size = UInt32(MemoryLayout<edge_usage>.size)
            _ = edge_use(handle, &use, nil)
            return Usage(use)
        }
    }

    /// Token ids of a text. `special`: control tokens are recognized.
    public func tokenize(_ text: String, special: Bool = false) throws -> [Int32] {
        let bytes = Array(text.utf8)
        return try queue.sync {
            try bytes.withUnsafeBytes { utf8 in
                let start = utf8.bindMemory(to: CChar.self).baseAddress
                func call(_ ids: UnsafeMutablePointer<Int32>?, _ room: Int) throws -> Int {
                    var count: Int64 = 0
                    try EdgeError.check {
                        count = edge_tokenize(handle, start, utf8.count, special ? 1 : 0, ids, room, &$0)
                        return count < 0 ? Int32(count) : 0
                    }
                    return Int(count)
                }
                let count = try call(nil, 0)
                var ids = [Int32](repeating: 0, count: count)
                _ = try ids.withUnsafeMutableBufferPointer { try call($0.baseAddress, $0.count) }
                return ids
            }
        }
    }

    /// The embedding of a text, of `info.dimensions` values; the first `dimensions` if that is not 0. `prompt`: the name
    /// of one of the model's, such as query or document, to stand before the text. `normalize`: scale to length 1.
    /// `truncate`: leave out the end of a text that is longer than the cache. Forgets the conversation. Throws
    /// `.unsupported` if the bundle makes no embeddings, `.full` for a text that is too long.
    public func embed(
        _ text: String, prompt: String? = nil, dimensions: Int = 0, normalize: Bool = true, truncate: Bool = false
    ) throws -> [Float] {
        try embed([text], prompt: prompt, dimensions: dimensions, normalize: normalize, truncate: truncate)[0]
    }

    /// Of several texts, which takes less time than one after the other.
    public func embed(
        _ texts: [String], prompt: String? = nil, dimensions: Int = 0, normalize: Bool = true, truncate: Bool = false
    ) throws -> [[Float]] {
        let size = dimensions > 0 ? dimensions : model.info.dimensions
        var lengths = texts.map(\.utf8.count)
        let bytes = texts.flatMap { $0.utf8.map { CChar(bitPattern: $0) } }
        var vectors = [Float](repeating: 0, count: texts.count * size)
        func call(_ name: UnsafePointer<CChar>?) throws {
            try bytes.withUnsafeBufferPointer { all in
                var at = 0
                var starts = lengths.map { length -> UnsafePointer<CChar>? in
                    defer { at += length }
                    return all.baseAddress.map { $0 + at }
                }
                var options = edge_embedding()
                options.size = UInt32(MemoryLayout<edge_embedding>.size)
                options.prompt = name
                options.dimensions = UInt32(clamping: dimensions)
                options.unscaled = normalize ? 0 : 1
                options.truncate = truncate ? 1 : 0
                try EdgeError.check {
                    edge_embed(handle, &starts, &lengths, texts.count, &options, &vectors, vectors.count, &$0)
                }
            }
        }
        try queue.sync {
            answers += 1
            if let prompt {
                try prompt.withCString { try call($0) }
            } else {
                try call(nil)
            }
        }
        return texts.indices.map { Array(vectors[$0 * size ..< ($0 + 1) * size]) }
    }

    // MARK: on the queue

    /// Calls `work` with the session, in place of an answer.
    func onQueue<Value>(_ work: (OpaquePointer) throws -> Value) throws -> Value {
        try queue.sync {
            answers += 1
            return try work(handle)
        }
    }

    /// The next piece of an answer, nil after its end. The first call asks.
    private func piece(of question: Question, _ prompt: String) async throws -> Piece? {
        try await withTaskCancellationHandler {
            try await withCheckedThrowingContinuation { continuation in
                queue.async {
                    continuation.resume(with: Result { try self.pieceNow(of: question, prompt) })
                }
            }
        } onCancel: {
            question.cancelled.set()
            self.cancel()
        }
    }

    private func pieceNow(of question: Question, _ prompt: String) throws -> Piece? {
        if question.number == nil {
            try appendNow(.user, prompt)
            question.number = answers
        }
        guard question.number == answers, ended == nil else { return nil } // it ended, or another question followed
        if question.cancelled.isSet { cancel() } // cancelled before it was asked
        return try nextPiece()
    }

    private func appendNow(_ role: Role, _ text: String) throws {
        answers += 1 // ends an answer that is still being read
        ended = nil
        let bytes = Array(text.utf8)
        try EdgeError.check { edge_append(handle, role.rawValue, bytes, bytes.count, &$0) }
    }

    private func nextPiece() throws -> Piece {
        if let sensors, -lastRead.timeIntervalSinceNow > 0.5 {
            var readings = sensors().native
            lastRead = Date()
            try EdgeError.check { edge_read(handle, &readings, &$0) }
        }
        var piece = edge_piece()
        piece.size = UInt32(MemoryLayout<edge_piece>.size)
        try EdgeError.check { edge_next(handle, &piece, &$0) }
        let finish = Finish(rawValue: piece.finish) ?? .interrupted // unknown: a reason of a later runtime
        ended = finish == .going ? nil : finish
        let text = withUnsafeBytes(of: piece.text) { String(decoding: $0.prefix(Int(piece.length)), as: UTF8.self) }
        return Piece(text: text, token: piece.token, finish: finish)
    }
}

/// The answer that a stream reads. The queue sets its number when the question is appended; nil before.
private final class Question: @unchecked Sendable {
    var number: Int?
    let cancelled = Flag()
}

/// Set once, from any thread.
private final class Flag: @unchecked Sendable {
    private let lock = NSLock()
    private var value = false

    var isSet: Bool {
        lock.lock()
        defer { lock.unlock() }
        return value
    }

    func set() {
        lock.lock()
        defer { lock.unlock() }
        value = true
    }
}
