import FoundationModels
import Testing

@testable import EdgeKit

private typealias Transcript = FoundationModels.Transcript
private typealias Entry = Transcript.Entry

private func said(_ text: String) -> [Transcript.Segment] { [.text(.init(content: text))] }

private func asked(
    _ executor: EdgeExecutor, _ model: EdgeLanguageModel, _ entries: [Entry], _ most: Int = 12,
    schema: String? = nil, tools: [Transcript.ToolDefinition] = [],
    mode: GenerationOptions.ToolCallingMode.Kind? = nil
) async throws -> (text: String, calls: [Transcript.ToolCall]) {
    var options = GenerationOptions()
    options.samplingMode = .init(.greedy)
    options.maximumResponseTokens = most
    options.toolCallingMode = mode.map { .init($0) }
    let channel = LanguageModelExecutorGenerationChannel()
    try await executor.respond(
        to: .init(
            transcript: Transcript(entries: entries), enabledTools: tools, schema: schema.map { GenerationSchema($0) },
            generationOptions: options),
        model: model, streamingInto: channel)
    var (text, calls) = ("", [Transcript.ToolCall]())
    for event in await channel.sent.events {
        switch event {
        case .response(_, .appendText(let part, _)): text += part
        case .toolCalls(_, .toolCall(let id, let name, .appendArguments(let json, _))):
            calls.append(.init(id: id, toolName: name, arguments: .init(json: json)))
        }
    }
    return (text, calls)
}

private func begun(ignoreEos: Bool = true) throws -> (EdgeLanguageModel, EdgeExecutor) {
    var options = EdgeOptions()
    options.ignoreEos = ignoreEos
    let model = EdgeLanguageModel(try EdgeModel(), options: options)
    return (model, try EdgeExecutor(configuration: model.executorConfiguration))
}

@Test func turnsAreTheSessions() async throws {
    let (model, executor) = try begun()
    var options = model.executorConfiguration.options
    options.temperature = 0
    options.maxTokens = 12
    let session = try EdgeModel().session(options)
    var entries: [Entry] = []
    for question in ["Hi", "Why?"] {
        entries.append(.prompt(.init(segments: said(question))))
        let answer = try await asked(executor, model, entries).text
        let wanted = try await session.respond(to: question)
        #expect(answer == wanted)
        entries.append(.response(.init(segments: said(answer))))
    }
    entries[0] = .prompt(.init(segments: said("Ho")))  // the conversation begins anew
    entries.append(.prompt(.init(segments: said("So?"))))
    let other = try EdgeModel().session(options)
    for entry in entries.dropLast() {
        switch entry {
        case .prompt(let prompt): try await other.append(.user, text(prompt.segments))
        case .response(let response): try await other.append(.assistant, text(response.segments))
        default: break
        }
    }
    let (answer, wanted) = (try await asked(executor, model, entries).text, try await other.respond(to: "So?"))
    #expect(answer == wanted)
}

private func text(_ segments: [Transcript.Segment]) -> String {
    if case .text(let part)? = segments.first { part.content } else { "" }
}

private let form = #"{"type":"object","properties":{"a":{"type":"boolean"}},"required":["a"]}"#

@Test func schemasHoldAndToolsAreCalled() async throws {
    let (model, executor) = try begun(ignoreEos: false)
    var entries: [Entry] = [.prompt(.init(segments: said("Fill it")))]
    let filled = try await asked(executor, model, entries, 40, schema: form).text
    #expect(filled.contains("\"a\""))
    entries.append(.response(.init(segments: [.structure(.init(content: .init(json: " " + filled)))])))
    entries.append(.prompt(.init(segments: said("Go on"))))
    let free = try await asked(executor, model, entries, 4)
    #expect(!free.text.isEmpty)

    let tool = Transcript.ToolDefinition(name: "switch", about: form)
    entries = [.prompt(.init(segments: said("Switch it on")))]
    let calls = try await asked(executor, model, entries, 60, tools: [tool], mode: .required).calls
    #expect(calls.map(\.toolName) == ["switch"])
    entries.append(.toolCalls(.init(calls)))
    entries.append(.toolOutput(.init(segments: said("done"))))
    let last = try await asked(executor, model, entries, 4, tools: [tool])
    #expect(!last.text.isEmpty)

    entries.removeFirst()  // calls of another conversation
    await #expect(throws: LanguageModelError.self) { try await asked(executor, model, entries, 4, tools: [tool]) }
    await #expect(throws: LanguageModelError.self) {
        try await asked(executor, model, [.prompt(.init(segments: [.custom("a sound")]))], 4)
    }
}

extension Transcript.ToolDefinition {
    init(name: String, about parameters: String) {
        self.init(name: name, description: "Switches", parameters: GenerationSchema(parameters))
    }
}
