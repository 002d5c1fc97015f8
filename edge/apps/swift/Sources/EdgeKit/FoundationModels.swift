// `_version: 2`: of the SDKs with `LanguageModel`, iOS 27 and macOS 27; earlier ones have the module without it.
#if canImport(FoundationModels, _version: 2)
import Foundation
import FoundationModels

/// A bundle's model for sessions of Apple's Foundation Models:
///
///     let session = LanguageModelSession(model: EdgeLanguageModel(try EdgeModel()))
///     let answer = try await session.respond(to: "Why is the sky blue?")
///
/// `options` hold wherever a request says nothing else, such as budgets.
@available(iOS 27.0, macOS 27.0, visionOS 27.0, watchOS 27.0, *)
public struct EdgeLanguageModel: LanguageModel {
    public typealias Executor = EdgeExecutor

    public let executorConfiguration: EdgeExecutor.Configuration

    public init(_ model: EdgeModel, options: EdgeOptions = EdgeOptions()) {
        executorConfiguration = EdgeExecutor.Configuration(model: model, options: options)
    }

    /// A model whose template apps cannot render tools in throws `unsupportedCapability` when it gets some.
    public var capabilities: LanguageModelCapabilities {
        LanguageModelCapabilities(
            [.guidedGeneration, .toolCalling] + (EdgeModel.file("eyes.edge") == nil ? [] : [.vision]))
    }
}

/// What answers the requests of one `LanguageModelSession`, in one `EdgeSession`.
@available(iOS 27.0, macOS 27.0, visionOS 27.0, watchOS 27.0, *)
public struct EdgeExecutor: LanguageModelExecutor {
    public typealias Model = EdgeLanguageModel

    public struct Configuration: Hashable, Sendable {
        let model: EdgeModel
        let options: EdgeOptions

        public static func == (left: Configuration, right: Configuration) -> Bool {
            left.model === right.model && left.options == right.options
        }

        public func hash(into hasher: inout Hasher) {
            hasher.combine(ObjectIdentifier(model))
            hasher.combine(options)
        }
    }

    private let follower: Follower

    public init(configuration: Configuration) throws {
        follower = Follower(configuration)
    }

    /// Allocates the memory of the session.
    public func prewarm(model: EdgeLanguageModel, transcript: FoundationModels.Transcript) {
        Task { [follower] in try? await follower.prepare() }
    }

    public func respond(
        to request: LanguageModelExecutorGenerationRequest, model: EdgeLanguageModel,
        streamingInto channel: LanguageModelExecutorGenerationChannel
    ) async throws {
        try await follower.respond(to: request, streamingInto: channel)
    }
}

@available(iOS 27.0, macOS 27.0, visionOS 27.0, watchOS 27.0, *)
private typealias Given = FoundationModels.Transcript  // EdgeKit's own is of speech

/// A session that follows a transcript: what it was told already is not told again, so its KV rows stay.
@available(iOS 27.0, macOS 27.0, visionOS 27.0, watchOS 27.0, *)
private actor Follower {
    private struct Answer {
        var text = ""
        var calls: [String] = []  // names of functions
    }

    private let configuration: EdgeExecutor.Configuration
    private var session: EdgeSession?
    private var told: [Given.Entry]?  // nil: unknown, after an error
    private var answer = Answer()  // behind them
    private var tools: String?

    init(_ configuration: EdgeExecutor.Configuration) {
        self.configuration = configuration
    }

    @discardableResult
    func prepare() throws -> EdgeSession {
        if let session { return session }
        let begun = try configuration.model.session(configuration.options)
        session = begun
        told = []
        return begun
    }

    func respond(
        to request: LanguageModelExecutorGenerationRequest,
        streamingInto channel: LanguageModelExecutorGenerationChannel
    ) async throws {
        let session = try prepare()
        try await session.set(options(request.generationOptions))
        let entries = Array(request.transcript)
        var rest = try await state(request.enabledToolDefinitions, in: session) ? unknown(of: entries) : nil
        told = nil
        answer = Answer()
        if rest == nil {
            try await session.rewind()
            rest = entries
        }
        for entry in rest ?? [] { try await tell(session, entry) }
        try await constrain(session, request)
        for try await piece in session.pieces() where !piece.text.isEmpty {
            answer.text += piece.text
            await channel.send(.response(action: .appendText(piece.text, tokenCount: 1)))
        }
        try Task.checkCancellation()
        if session.finish == .toolCalls {
            for call in try await session.calls() {
                answer.calls.append(call.name)
                await channel.send(
                    .toolCalls(
                        action: .toolCall(
                            id: call.id, name: call.name, action: .appendArguments(call.arguments, tokenCount: 1))))
            }
        }
        told = entries
    }

    /// The entries that the session was not told; nil if the transcript does not begin as the session does.
    private func unknown(of entries: [Given.Entry]) -> [Given.Entry]? {
        guard let told, entries.starts(with: told) else { return nil }
        var rest = entries.dropFirst(told.count)
        if !answer.text.isEmpty {
            guard case .response(let response)? = rest.popFirst(), Self.holds(response.segments, answer.text) else {
                return nil
            }
        }
        if !answer.calls.isEmpty {
            guard case .toolCalls(let calls)? = rest.popFirst(), calls.map(\.toolName) == answer.calls else {
                return nil
            }
        }
        return Array(rest)
    }

    /// Whether segments are this text: a structured answer may have other spaces, and another order of its fields.
    private static func holds(_ segments: [Given.Segment], _ text: String) -> Bool {
        if case .structure(let structured)? = segments.first, segments.count == 1 {
            let values = [structured.content.jsonString, text].map {
                try? JSONSerialization.jsonObject(with: Data($0.utf8), options: .fragmentsAllowed) as? NSObject
            }
            return values[0] != nil && values[0] == values[1]
        }
        return segments.map { if case .text(let part) = $0 { part.content } else { "" } }.joined() == text
    }

    /// States the functions that may be called. Returns false if they changed, which begins the conversation anew.
    private func state(_ definitions: [Given.ToolDefinition], in session: EdgeSession) async throws -> Bool {
        let encoder = JSONEncoder()
        encoder.outputFormatting = .sortedKeys  // so that equal tools are equal texts
        let json = try definitions.map { tool in
            let parts = [
                "\"name\":" + text(try encoder.encode(tool.name)),
                "\"description\":" + text(try encoder.encode(tool.description)),
                "\"parameters\":" + text(try encoder.encode(tool.parameters)),
            ]
            return "{\"type\":\"function\",\"function\":{\(parts.joined(separator: ","))}}"
        }
        let wanted = json.isEmpty ? nil : "[\(json.joined(separator: ","))]"
        if wanted == tools { return true }
        try await session.rewind()
        told = nil
        do {
            try await session.tools(wanted)
        } catch let error as EdgeError where error.code == .unsupported {
            throw LanguageModelError.unsupportedCapability(
                .init(capability: .toolCalling, debugDescription: error.message))
        }
        tools = wanted
        return false
    }

    /// The form of the answer, and what it may call. An answer with a schema calls nothing, unless it must.
    private func constrain(_ session: EdgeSession, _ request: LanguageModelExecutorGenerationRequest) async throws {
        var choice = "auto"
        switch request.generationOptions.toolCallingMode?.kind {
        case .required?: choice = "required"
        case .disallowed?: choice = "none"
        default: choice = request.schema == nil ? "auto" : "none"
        }
        do {
            if tools != nil { try await session.choose("none") }  // while calls must be made, answers take no form
            let schema = choice == "required" ? nil : request.schema
            try await session.constrain(
                schema == nil ? .free : .jsonSchema, try schema.map { text(try JSONEncoder().encode($0)) } ?? "")
            if tools != nil { try await session.choose(choice) }
        } catch let error as EdgeError where error.code == .unsupported {
            throw LanguageModelError.unsupportedGenerationGuide(
                .init(schemaName: nil, debugDescription: error.message))
        }
    }

    /// Pictures of a prompt stand before its text.
    private func tell(_ session: EdgeSession, _ entry: Given.Entry) async throws {
        switch entry {
        case .instructions(let instructions):
            try await session.append(.system, try await content(session, instructions.segments, entry))
        case .prompt(let prompt):
            try await session.append(.user, try await content(session, prompt.segments, entry))
        case .response(let response):
            try await session.append(.assistant, try await content(session, response.segments, entry))
        case .toolOutput(let output):
            try await session.append(.result, try await content(session, output.segments, entry))
        case .reasoning:
            return
        case .toolCalls:
            throw refused(entry, "calls of an earlier session: a session knows only its own calls of tools")
        @unknown default:
            throw refused(entry, "entries of a kind that EdgeKit does not know")
        }
    }

    private func content(
        _ session: EdgeSession, _ segments: [Given.Segment], _ entry: Given.Entry
    ) async throws -> String {
        var texts: [String] = []
        for segment in segments {
            switch segment {
            case .text(let part): texts.append(part.content)
            case .structure(let part): texts.append(part.content.jsonString)
            #if canImport(CoreGraphics)
            case .attachment(let part):
                guard case .prompt = entry, case .image(let picture) = part.content else {
                    throw refused(entry, "attachments that are no pictures of a prompt")
                }
                try await session.image(picture.cgImage)
            #endif
            default: throw refused(entry, "segments that are neither text nor pictures")
            }
        }
        return texts.joined(separator: "\n")
    }

    private func refused(_ entry: Given.Entry, _ what: String) -> LanguageModelError {
        .unsupportedTranscriptContent(.init(unsupportedContent: [entry], debugDescription: what))
    }

    private func options(_ asked: GenerationOptions) throws -> EdgeOptions {
        var options = configuration.options
        if let temperature = asked.temperature { options.temperature = temperature }
        if let most = asked.maximumResponseTokens { options.maxTokens = most }
        switch asked.samplingMode?.kind {
        case nil: break
        case .greedy?: options.temperature = 0
        case .randomTopK(let count, let seed)?: (options.topK, options.seed) = (count, seed ?? options.seed)
        case .randomProbabilityThreshold(let mass, let seed)?:
            (options.topK, options.topP, options.seed) = (0, mass, seed ?? options.seed)
        @unknown default:
            throw EdgeError(code: .unsupported, message: "a samplingMode of a kind that EdgeKit does not know")
        }
        return options
    }

    private func text(_ data: Data) -> String { String(decoding: data, as: UTF8.self) }
}
#endif
