import CEdge
import Foundation

/// A conversation with a model.
///
/// All functions may be called from any thread. Those with `async` run one after another, on a thread of the session;
/// cancelling their task cancels what they compute. The others never wait, not even while a long prompt runs.
public final class EdgeSession: @unchecked Sendable {
    let model: EdgeModel  // stays mapped as long as the session
    private let handle: OpaquePointer
    private let sensors: (@Sendable () -> Readings)?
    private let queue = DispatchQueue(label: "edge.session", qos: .userInitiated)
    private var lastRead = Date.distantPast  // belongs to the queue
    private let state = Locked(State())
    private let running = Locked<Locked<Bool>?>(nil)  // what the queue runs: whether its task was cancelled

    private struct State {
        var answers = 0  // questions so far, and calls that end an answer; of which a stream notes its own
        var responding = false
        var finish: Finish?
    }

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
        edge_end(handle)  // no call is running: each holds the session
    }

    /// Why the last answer ended; nil before the first, while one is generated, and after an error.
    public var finish: Finish? { state.with { $0.finish } }

    /// Whether an answer is being generated.
    public var isResponding: Bool { state.with { $0.responding } }

    /// Adds a text to the conversation; the next answer does most of the work.
    public func append(_ role: Role, _ text: String) async throws {
        try await change { try Self.append($0, role, text) }
    }

    /// The whole answer to a prompt.
    public func respond(to prompt: String) async throws -> String {
        var answer = ""
        for try await text in self.answer(to: prompt) { answer += text }
        return answer
    }

    /// The answer to a prompt as text, in whole characters.
    ///
    /// It is generated while it is read. It ends before its next token if the reading task is cancelled, when the loop
    /// is left, and when another question is asked. `finish` is the reason of its end: `.interrupted` in these three
    /// cases. A question that ends so before its first token is taken back.
    public func answer(to prompt: String) -> Answer {
        Answer(pieces: pieces(of: prompt))
    }

    /// As `answer(to:)`, with token ids, progress while the prompt runs, and the reason of the end.
    public func pieces(of prompt: String) -> Pieces {
        Pieces(session: self, prompt: prompt)
    }

    /// The answer to the appended texts.
    public func pieces() -> Pieces {
        Pieces(session: self, prompt: nil)
    }

    /// Ends the answer before its next token, also while its prompt runs.
    public func cancel() {
        edge_cancel(handle)
    }

    /// Other options, from the next answer on.
    public func set(_ options: EdgeOptions) async throws {
        try await onQueue { handle in
            try options.withNative { native in try EdgeError.check { edge_set(handle, &native, &$0) } }
        }
    }

    /// Sets the form of the next and later answers: `text` is a JSON schema or a regular expression. An answer ends
    /// where its form does. If the form is refused, answers are free. Throws `.unsupported`, which names what cannot be
    /// enforced, `.badArgument` for a text that is malformed.
    public func constrain(_ form: Form, _ text: String = "") async throws {
        try await change { handle in
            try text.withCString { utf8 in
                try EdgeError.check { edge_constrain(handle, form.rawValue, utf8, text.utf8.count, &$0) }
            }
        }
    }

    /// Adds to the logits of tokens, in the next and later answers: 100 makes a token all but certain, -100 rules it out.
    public func bias(_ biases: [Int32: Float]) async throws {
        let pairs = biases.map { edge_logit_bias(token: $0.key, bias: $0.value) }
        try await change { handle in try EdgeError.check { edge_bias(handle, pairs, pairs.count, &$0) } }
    }

    /// Forgets the last turns, each a question with its answer; nil: all. Throws `.unsupported` where they cannot
    /// be taken back: after evictions. Then forget all, and append the conversation again.
    public func rewind(_ turns: Int? = nil) async throws {
        try await onQueue { handle in
            self.interrupt()  // its question is the last turn
            try EdgeError.check { edge_rewind(handle, turns.map { UInt32(clamping: $0) } ?? UInt32.max, &$0) }
        }
    }

    /// The conversation with its KV rows, for `load` in a session of the same bundle.
    public func save() async throws -> Data {
        try await onQueue { handle in
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

    /// Replaces the conversation. If the state is refused, the conversation stays as it was.
    public func load(_ state: Data) async throws {
        try await change { handle in
            try Self.lend(state) { stream in try EdgeError.check { edge_load(handle, &stream, &$0) } }
        }
    }

    /// Sets a LoRA adapter made by `edge export-adapter`; nil: none. `scale`: factor of its change. Forgets the whole
    /// conversation. Throws `.badFile` for adapters of other models, `.unsupported` if the bundle has no room for
    /// adapters (`info.loraRank`).
    public func setAdapter(_ adapter: Data?, scale: Double = 1) async throws {
        try await change { handle in
            guard let adapter else {
                return try EdgeError.check { edge_set_adapter(handle, nil, scale, &$0) }
            }
            try Self.lend(adapter) { stream in
                try EdgeError.check { edge_set_adapter(handle, &stream, scale, &$0) }
            }
        }
    }

    /// Returns memory to the system, between two tokens of an answer if there is one; its rows are lost for good.
    public func trim(_ level: Trim) throws {
        try EdgeError.check { edge_trim(handle, level.rawValue, &$0) }
    }

    /// At once: while an answer is generated, figures of before its last step.
    public func usage() -> Usage {
        var use = edge_usage()
        use.size = UInt32(MemoryLayout<edge_usage>.size)
        _ = edge_use(handle, &use, nil)
        return Usage(use)
    }

    /// Token ids of a text, at once. `special`: control tokens are recognized.
    public func tokenize(_ text: String, special: Bool = false) throws -> [Int32] {
        let bytes = text.utf8.map { CChar(bitPattern: $0) }
        func call(_ ids: UnsafeMutablePointer<Int32>?, _ room: Int) throws -> Int {
            var count: Int64 = 0
            try EdgeError.check {
                count = edge_tokenize(handle, bytes, bytes.count, special ? 1 : 0, ids, room, &$0)
                return count < 0 ? Int32(count) : 0
            }
            return Int(count)
        }
        var ids = [Int32](repeating: 0, count: try call(nil, 0))
        _ = try ids.withUnsafeMutableBufferPointer { try call($0.baseAddress, $0.count) }
        return ids
    }

    // MARK: on the queue

    /// Calls `work` with the session, after what runs. Cancelling the task cancels what the session computes.
    func onQueue<Value: Sendable>(_ work: @escaping @Sendable (OpaquePointer) throws -> Value) async throws -> Value {
        let cancelled = Locked(false)
        return try await withTaskCancellationHandler {
            try await withCheckedThrowingContinuation { continuation in
                queue.async {
                    self.running.with { $0 = cancelled }
                    if cancelled.with({ $0 }) { self.cancel() }
                    let result = Result { try work(self.handle) }
                    self.running.with { $0 = nil }
                    continuation.resume(with: result)
                }
            }
        } onCancel: {
            cancelled.with { $0 = true }
            self.running.with { if $0 === cancelled { self.cancel() } }  // within the lock: it is still this work
        }
    }

    /// As `onQueue`, and ends an answer that is still being read.
    func change<Value: Sendable>(_ work: @escaping @Sendable (OpaquePointer) throws -> Value) async throws -> Value {
        try await onQueue { handle in
            if self.interrupt() { _ = edge_rewind(handle, 0, nil) }  // no turns, but the answer ends
            return try work(handle)
        }
    }

    /// Notes that an answer ends before its end. Returns whether there was one.
    @discardableResult
    private func interrupt() -> Bool {
        state.with {
            let responding = $0.responding
            if responding { $0.finish = .interrupted }
            $0.responding = false
            $0.answers += 1
            return responding
        }
    }

    /// Begins an answer; returns its number.
    func begin(_ prompt: String?) async throws -> Int {
        try await onQueue { handle in
            self.interrupt()
            self.state.with { $0.finish = nil }
            if let prompt { try Self.append(handle, .user, prompt) }
            return self.state.with {
                $0.responding = true
                return $0.answers
            }
        }
    }

    /// Notes that an answer was cancelled before it began.
    func neverBegun() {
        state.with { if !$0.responding { $0.finish = .interrupted } }
    }

    /// The next piece of an answer; nil after its end, and if another question followed.
    func next(of number: Int) async throws -> Piece? {
        let current: @Sendable () -> Bool = { self.state.with { $0.responding && $0.answers == number } }
        return try await onQueue { _ in current() ? try self.nextPiece() : nil }
    }

    /// Ends an answer whose stream is read no more.
    func abandon(_ number: Int) {
        let abandoned: Bool = state.with {
            guard $0.responding && $0.answers == number else { return false }
            $0.finish = .interrupted
            $0.responding = false
            $0.answers += 1
            cancel()  // within the lock: no other question has been asked
            return true
        }
        guard abandoned else { return }
        queue.async {
            let last = self.state.with { $0.answers == number + 1 }
            if last { _ = edge_rewind(self.handle, 0, nil) }  // no turns, but the answer ends
        }
    }

    private func nextPiece() throws -> Piece {
        if let sensors, -lastRead.timeIntervalSinceNow > 0.5 {
            var readings = sensors().native
            lastRead = Date()
            try EdgeError.check { edge_read(handle, &readings, &$0) }
        }
        var piece = edge_piece()
        piece.size = UInt32(MemoryLayout<edge_piece>.size)
        do {
            try EdgeError.check { edge_next(handle, &piece, &$0) }
        } catch {
            state.with { $0.responding = false }
            throw error
        }
        let finish = Finish(rawValue: piece.finish) ?? .interrupted  // unknown: a reason of a later runtime
        if finish != .going {
            state.with {
                $0.finish = finish
                $0.responding = false
            }
        }
        let text = withUnsafeBytes(of: piece.text) { String(decoding: $0.prefix(Int(piece.length)), as: UTF8.self) }
        return Piece(text: text, token: piece.token, finish: finish, done: Int(piece.done), asked: Int(piece.asked))
    }

    private static func append(_ handle: OpaquePointer, _ role: Role, _ text: String) throws {
        let bytes = Array(text.utf8)
        try EdgeError.check { edge_append(handle, role.rawValue, bytes, bytes.count, &$0) }
    }

    /// Lends the bytes of a state or an adapter to the library.
    private static func lend(_ data: Data, _ work: (inout edge_stream) throws -> Void) throws {
        var copy = data
        try copy.withUnsafeMutableBytes { bytes in
            var stream = edge_stream()
            stream.size = UInt32(MemoryLayout<edge_stream>.size)
            stream.fd = -1
            stream.buffer = bytes.baseAddress
            stream.capacity = UInt64(bytes.count)
            stream.length = UInt64(bytes.count)
            try work(&stream)
        }
    }
}

/// A value that threads share.
final class Locked<Value>: @unchecked Sendable {
    private let lock = NSLock()
    private var value: Value

    init(_ value: Value) { self.value = value }

    func with<Result>(_ work: (inout Value) -> Result) -> Result {
        lock.lock()
        defer { lock.unlock() }
        return work(&value)
    }
}
