import Foundation
import Testing

@testable import EdgeKit

/// The package's own model: it answers, is cancelled, saved and loaded, and says what was wrong. Run it on the device
/// it is for.
@Suite(.serialized) struct SessionTests {
    let model: EdgeModel
    let greedy: EdgeOptions
    let long = String(repeating: "word ", count: 40)

    init() throws {
        model = try EdgeModel()
        var options = EdgeOptions()
        options.temperature = 0
        options.maxTokens = 12
        options.ignoreEos = true
        greedy = options
    }

    @Test func answersAlikeInPiecesAndAtOnce() async throws {
        let session = try model.session(greedy)
        var text = ""
        for try await piece in session.answer(to: "Hi") { text += piece }
        #expect(session.finish == .length)
        #expect(!session.isResponding)
        try await session.rewind()
        #expect(try await session.respond(to: "Hi") == text)
    }

    @Test func conversationGoesOnFromItsState() async throws {
        let session = try model.session(greedy)
        _ = try await session.respond(to: "Hi")
        let state = try await session.save()
        let expected = try await session.respond(to: "And?")
        for refused in [Data("0123456789".utf8), state.dropLast()] {
            await #expect(throws: EdgeError.self) { try await session.load(refused) }
        }
        let other = try model.session(greedy)
        try await other.load(state)
        #expect(try await other.respond(to: "And?") == expected)
    }

    @Test func finishIsInterruptedHoweverAnAnswerIsLeft() async throws {
        var options = greedy
        options.maxTokens = nil
        let session = try model.session(options)
        for try await _ in session.pieces(of: "Hi") where session.usage().tokens > 4 { break }
        #expect(session.finish == .interrupted)
        try await session.rewind()
        let answer = Task { try await session.respond(to: "Hi") }
        while session.usage().tokens < 60 { try await pause() }
        answer.cancel()
        _ = try await answer.value
        #expect(session.finish == .interrupted)
        try await session.rewind()
        try await session.set(greedy)
        _ = try await session.respond(to: "Hi")
        #expect(session.finish == .length)
        let never = Task {
            while !Task.isCancelled { try? await pause() }
            return try await session.respond(to: "Hi")
        }
        never.cancel()
        #expect(try await never.value == "")
        #expect(session.finish == .interrupted)
    }

    @Test func questionCancelledInItsPromptIsTakenBack() async throws {
        let session = try model.session(greedy)
        _ = try await session.respond(to: "Hi")
        let before = session.usage()
        var begun = false
        for try await piece in session.pieces(of: long) {
            #expect(piece.done <= piece.asked)
            begun = begun || piece.token >= 0
            session.cancel()
        }
        // Else the prompt was one chunk, or rows are gone.
        if !begun, session.finish == .interrupted, session.usage().evicted == before.evicted {
            #expect(session.usage().rows == before.rows)
        }
        _ = try await session.respond(to: "And?")
        #expect(session.finish == .length)
    }

    @Test func readsWhileAPromptRuns() async throws {
        let session = try model.session(greedy)
        let expected = try session.tokenize("The fox")
        let answer = Task { try await session.respond(to: long) }
        while session.usage().tokens == 0 {
            #expect(try session.tokenize("The fox") == expected)
            try await pause()
        }
        _ = try await answer.value
    }

    @Test func errorsNameSwiftsFunctions() async throws {
        let session = try model.session(greedy)
        await #expect {
            for try await _ in session.pieces() {}
        } throws: { error in
            (error as? EdgeError)?.message.hasSuffix("call append first") == true
        }
        var wrong = greedy
        wrong.temperature = -.infinity
        wrong.topP = 7
        #expect(throws: EdgeError.self) { try model.session(wrong) }
    }

    private func pause() async throws {
        try await Task.sleep(nanoseconds: 1_000_000)
    }
}
