import EdgeKit
import Foundation
import Testing

@testable import Sample

/// The sample without its views: it asks, sets a timer by a call, fills the form, ends and goes on.
@MainActor @Suite(.serialized) struct ConversationTests {
    let file = URL(fileURLWithPath: NSTemporaryDirectory()).appendingPathComponent(UUID().uuidString)

    @Test func conversationCallsFillsAndGoesOn() async throws {
        var minutes: [Int] = []
        let conversation = Conversation(file: file) { minutes.append($0) }
        await conversation.open()
        #expect(conversation.modes == [.chat, .timer, .form])
        for (question, mode) in [("Hi", Mode.chat), ("Wake me in 20 minutes.", .timer), ("For Ada.", .form)] {
            conversation.ask(question, mode)
            #expect(conversation.phase == .answering)
            await conversation.settle()
            #expect(conversation.phase == .ready)
        }
        #expect(minutes.count == 1 && minutes.allSatisfy { (1...600).contains($0) })
        #expect(conversation.turns.last?.fields.map(\.label) == ["Name", "People", "Day", "Outside"])
        await conversation.keep()
        let next = Conversation(file: file) { _ in }
        await next.open()
        #expect(next.turns.map(\.text) == conversation.turns.map(\.text))
        try FileManager.default.removeItem(at: file)
    }
}

enum Kind: String, Codable, CaseIterable { case now = "at once", later }

struct Place: Codable {
    let city: String
    let height: Double?
}

struct Alarm: Codable {
    let minutes: Int
    let kind: Kind
    let places: [Place]
    let small: Int8
    let loud: Bool?
}

final class Node: Decodable {
    let next: [Node]
}

@Suite struct SchemaTests {
    @Test func schemasOfTypesAreThoseBuiltByHand() throws {
        let place = Schema.object(["city": .string, "height": .number], optional: ["height"])
        let alarm = Schema.object(
            [
                "minutes": .integer, "kind": .oneOf(["at once", "later"]), "places": .array(of: place),
                "small": .integer(-128...127), "loud": .boolean,
            ], optional: ["loud"])
        #expect(try Schema(of: Alarm.self) == alarm)
        print("SCHEMA=" + alarm.with("minutes", ["minimum": 1, "description": "\"how\" long"]).json)
        for value in [
            Alarm(minutes: 20, kind: .now, places: [Place(city: "é 😀", height: 21.5)], small: -3, loud: nil),
            Alarm(minutes: 1, kind: .later, places: [], small: 7, loud: true),
        ] { print("VALUE=" + String(decoding: try JSONEncoder().encode(value), as: UTF8.self)) }
    }

    @Test func typesThatContainThemselvesHaveNone() {
        #expect(throws: EdgeError.self) { try Schema(of: Node.self) }
        #expect(throws: EdgeError.self) { try Schema(of: Date.self) }
    }
}
