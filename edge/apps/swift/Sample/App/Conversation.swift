import EdgeKit
import Foundation
import Observation

/// A part of the conversation on the screen. `fields`: of a form, its labels and values.
struct Turn: Codable, Identifiable, Sendable {
    enum By: String, Codable, Sendable { case person, model, app }

    struct Field: Codable, Sendable {
        let label: String
        let value: String
    }

    var id = UUID()
    let by: By
    var text: String
    var fields: [Field] = []
}

/// The arguments of the tool `set_timer`.
struct TimerCall: Decodable, Sendable {
    let minutes: Int
}

/// The form that an answer fills.
struct Booking: Decodable, Sendable {
    enum Day: String, Decodable, CaseIterable, Sendable {
        case monday, tuesday, wednesday, thursday, friday, saturday, sunday
    }

    let name: String
    let people: Int
    let day: Day
    let outside: Bool

    var fields: [Turn.Field] {
        [
            .init(label: "Name", value: name), .init(label: "People", value: "\(people)"),
            .init(label: "Day", value: day.rawValue.capitalized), .init(label: "Outside", value: outside ? "yes" : "no"),
        ]
    }
}

/// What the next question is for.
enum Mode: String, CaseIterable, Sendable {
    case chat, timer, form

    /// Of the tools that its answer may call.
    var choice: String {
        switch self {
        case .chat: return "auto"
        case .timer: return "set_timer"
        case .form: return "none"
        }
    }
}

/// The conversation, without its views. `file` keeps it through the end of the process.
@MainActor @Observable
final class Conversation {
    enum Phase { case loading, ready, answering, failed }

    private(set) var phase = Phase.loading
    private(set) var turns: [Turn] = []
    private(set) var status = ""
    private(set) var modes = [Mode.chat]
    private(set) var hasPicture = false  // waits for a question
    let sees: Bool
    let hears: Bool  // and answers nothing: a Whisper model
    private let file: URL
    private let setTimer: @MainActor (Int) -> Void
    private var session: EdgeSession?
    private var picture: Pixels?
    private var work: Task<Void, Never>?

    /// `setTimer` is called with minutes.
    init(file: URL, setTimer: @escaping @MainActor (Int) -> Void) {
        self.file = file
        self.setTimer = setTimer
        sees = EdgeModel.file("eyes.edge") != nil
        hears = EdgeModel.file("ears.edge") != nil
    }

    func open() async {
        guard session == nil else { return }
        do {
            var options = EdgeOptions()
            options.maxTokens = 512
            options.headroom = 0.9
            let begun = try await Task.detached { [options] in try EdgeModel().session(options) }.value
            let takesTools = sees || hears ? false : try await stateTools(begun)
            turns = hears ? [] : await restore(begun)
            session = begun
            modes = [.chat] + (takesTools ? [.timer] : []) + (hears ? [] : [.form])
            phase = .ready
            #if os(iOS)
            begun.trimOnMemoryWarnings()
            #endif
        } catch {
            phase = .failed
            status = error.localizedDescription
        }
    }

    /// False for models whose chat template writes tools in a notation of its own.
    private func stateTools(_ begun: EdgeSession) async throws -> Bool {
        let schema = try Schema(of: TimerCall.self).with("minutes", ["minimum": 1, "maximum": 600])
        do {
            try await begun.tools([Tool(name: "set_timer", about: "Sets a timer", parameters: schema)])
            return true
        } catch let error as EdgeError where error.code == .unsupported {
            return false
        }
    }

    /// A picture for the next question.
    func show(_ picture: Pixels) {
        self.picture = picture
        hasPicture = true
    }

    func ask(_ question: String, _ mode: Mode) {
        guard !question.isEmpty, phase == .ready else { return }
        turns.append(Turn(by: .person, text: question))
        run { session in
            let seen = self.picture
            self.picture = nil  // also if it is refused
            self.hasPicture = false
            if let seen { try await session.image(seen) }
            if self.modes.contains(.timer) { try await session.choose(mode.choice, parallel: mode == .chat) }
            switch mode {
            case .form:
                let form = try Schema(of: Booking.self).with("people", ["minimum": 1, "maximum": 20])
                let booking = try await session.respond(to: question, as: Booking.self, form)
                self.turns.append(Turn(by: .app, text: "A table is booked.", fields: booking.fields))
            case .timer:
                try await self.write(session.pieces(of: question))
                let calls = try await session.calls()
                try await session.choose("none")
                try await self.answerCalls(calls, session)
            case .chat:
                try await self.write(session.pieces(of: question))
                if session.finish == .toolCalls { try await self.answerCalls(session.calls(), session) }
            }
        }
    }

    private func answerCalls(_ calls: [ToolCall], _ session: EdgeSession) async throws {
        guard !calls.isEmpty else { return }
        for call in calls { try await session.append(.result, perform(call)) }
        try await write(session.pieces())
    }

    /// Calls a function of the app; returns its result as the model reads it.
    private func perform(_ call: ToolCall) -> String {
        guard let timer = try? call.decoded(TimerCall.self) else { return "Error: minutes is no number." }
        setTimer(timer.minutes)
        turns.append(Turn(by: .app, text: "\(call.name): \(timer.minutes) minutes"))
        return "The timer is set to \(timer.minutes) minutes."
    }

    /// Writes what is said in samples of this rate, with a model that hears, until they end.
    func listen(to sound: AsyncStream<[Float]>, rate: Int) {
        guard phase == .ready else { return }
        run { session in
            var hearing = Hearing()
            hearing.rate = rate
            hearing.live = true
            let transcript = try await session.listen(hearing)
            for await samples in sound {
                for segment in try await transcript.hear(samples) { self.append(segment.text + "\n") }
            }
            for segment in try await transcript.end() { self.append(segment.text + "\n") }
        }
    }

    private func run(_ body: @escaping @MainActor (EdgeSession) async throws -> Void) {
        guard let session else { return }
        phase = .answering
        work = Task {
            do {
                try await body(session)
            } catch is DecodingError {
                turns.append(Turn(by: .app, text: "The answer was cut: ask again."))
            } catch {
                turns.append(Turn(by: .app, text: error.localizedDescription))
            }
            status = summary(session)
            phase = .ready
        }
    }

    private func write(_ pieces: Pieces) async throws {
        for try await piece in pieces {
            if !piece.text.isEmpty { append(piece.text) }
            if piece.done < piece.asked { status = "Reading: \(piece.done) of \(piece.asked) tokens" }
        }
    }

    /// Adds to the model's turn, which begins with the first text.
    private func append(_ text: String) {
        if turns.last?.by != .model { turns.append(Turn(by: .model, text: "")) }
        turns[turns.count - 1].text += text
    }

    func cancel() {
        work?.cancel()
    }

    /// Waits for the end of an answer.
    func settle() async {
        await work?.value
    }

    private func summary(_ session: EdgeSession) -> String {
        let use = session.usage()
        let mebibytes = (use.weights + use.kv + use.scratch) >> 20
        let energy = "\(Int(use.joules)) J \(use.measured ? "measured" : "estimated")"
        return "\(session.finish.map { "\($0)" } ?? "failed"), \(mebibytes) MiB, \(use.rows) KV rows, \(energy)"
    }

    /// What a file has: the turns as they are shown, and the session's state.
    private struct Kept: Codable {
        let turns: [Turn]
        let state: Data
    }

    /// Keeps the conversation for the next process, when a running answer has ended.
    func keep() async {
        await settle()
        guard let session, !hears, let state = try? await session.save() else { return }
        let kept = try? PropertyListEncoder().encode(Kept(turns: turns, state: state))
        try? kept?.write(to: file, options: .atomic)
    }

    /// What was said; nothing if there is no conversation, or it is another model's.
    private func restore(_ begun: EdgeSession) async -> [Turn] {
        guard let data = try? Data(contentsOf: file), let kept = try? PropertyListDecoder().decode(Kept.self, from: data),
            (try? await begun.load(kept.state)) != nil
        else { return [] }
        return kept.turns
    }
}
