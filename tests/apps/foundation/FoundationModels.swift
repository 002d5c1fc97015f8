// What EdgeKit uses of Apple's FoundationModels of 2026, as its documentation and the adapters that Apple published
// declare it, so that Swift on Linux checks the types of ours. A channel keeps what it is sent.
import Foundation

public protocol LanguageModel: Sendable {
    associatedtype Executor: LanguageModelExecutor where Executor.Model == Self
    var capabilities: LanguageModelCapabilities { get }
    var executorConfiguration: Executor.Configuration { get }
}

public protocol LanguageModelExecutor: Sendable {
    associatedtype Configuration: Hashable, Sendable
    associatedtype Model: LanguageModel
    init(configuration: Configuration) throws
    func prewarm(model: Model, transcript: Transcript)
    func respond(
        to request: LanguageModelExecutorGenerationRequest, model: Model,
        streamingInto channel: LanguageModelExecutorGenerationChannel
    ) async throws
}

public struct LanguageModelCapabilities: Sendable {
    public enum Capability: Sendable { case vision, guidedGeneration, reasoning, toolCalling }

    let set: [Capability]

    public init(_ capabilities: [Capability]) { set = capabilities }

    public func contains(_ capability: Capability) -> Bool { set.contains(capability) }
}

public struct GenerationSchema: Codable, Sendable {
    let type: String
    let properties: [String: [String: String]]?
    let required: [String]?

    public init(_ json: String) { self = try! JSONDecoder().decode(Self.self, from: Data(json.utf8)) }
}

public struct GeneratedContent: Equatable, Sendable {
    public let jsonString: String

    public init(json: String) { jsonString = json }
}

public struct GenerationOptions: Sendable {
    public struct SamplingMode: Sendable {
        public enum Kind: Sendable {
            case greedy, randomTopK(Int, seed: UInt64?), randomProbabilityThreshold(Double, seed: UInt64?)
        }

        public let kind: Kind

        public init(_ kind: Kind) { self.kind = kind }
    }

    public struct ToolCallingMode: Sendable {
        public enum Kind: Sendable { case allowed, required, disallowed }

        public let kind: Kind

        public init(_ kind: Kind) { self.kind = kind }
    }

    public var samplingMode: SamplingMode?
    public var temperature: Double?
    public var maximumResponseTokens: Int?
    public var toolCallingMode: ToolCallingMode?

    public init() {}
}

public struct Transcript: RandomAccessCollection, Sendable {
    public enum Entry: Equatable, Sendable {
        case instructions(Instructions), prompt(Prompt), toolCalls(ToolCalls), toolOutput(ToolOutput)
        case response(Response), reasoning(Reasoning)
    }

    public enum Segment: Equatable, Sendable {
        case text(TextSegment), structure(StructuredSegment), custom(String)
    }

    public struct TextSegment: Equatable, Sendable {
        public let content: String
        public init(content: String) { self.content = content }
    }

    public struct StructuredSegment: Equatable, Sendable {
        public let content: GeneratedContent
        public init(content: GeneratedContent) { self.content = content }
    }

    public struct Instructions: Equatable, Sendable {
        public let segments: [Segment]
        public init(segments: [Segment]) { self.segments = segments }
    }

    public struct Prompt: Equatable, Sendable {
        public let segments: [Segment]
        public init(segments: [Segment]) { self.segments = segments }
    }

    public struct Response: Equatable, Sendable {
        public let segments: [Segment]
        public init(segments: [Segment]) { self.segments = segments }
    }

    public struct Reasoning: Equatable, Sendable {}

    public struct ToolCall: Equatable, Sendable {
        public let id: String
        public let toolName: String
        public let arguments: GeneratedContent
        public init(id: String, toolName: String, arguments: GeneratedContent) {
            (self.id, self.toolName, self.arguments) = (id, toolName, arguments)
        }
    }

    public struct ToolCalls: Equatable, RandomAccessCollection, Sendable {
        let calls: [ToolCall]
        public init(_ calls: [ToolCall]) { self.calls = calls }
        public var startIndex: Int { 0 }
        public var endIndex: Int { calls.count }
        public subscript(position: Int) -> ToolCall { calls[position] }
    }

    public struct ToolOutput: Equatable, Sendable {
        public let segments: [Segment]
        public init(segments: [Segment]) { self.segments = segments }
    }

    public struct ToolDefinition: Sendable {
        public let name: String
        public let description: String
        public let parameters: GenerationSchema
        public init(name: String, description: String, parameters: GenerationSchema) {
            (self.name, self.description, self.parameters) = (name, description, parameters)
        }
    }

    let entries: [Entry]
    public init(entries: [Entry]) { self.entries = entries }
    public var startIndex: Int { 0 }
    public var endIndex: Int { entries.count }
    public subscript(position: Int) -> Entry { entries[position] }
}

public struct LanguageModelExecutorGenerationRequest: Sendable {
    public let transcript: Transcript
    public let enabledToolDefinitions: [Transcript.ToolDefinition]
    public let schema: GenerationSchema?
    public let generationOptions: GenerationOptions

    public init(
        transcript: Transcript, enabledTools: [Transcript.ToolDefinition], schema: GenerationSchema?,
        generationOptions: GenerationOptions
    ) {
        (self.transcript, enabledToolDefinitions) = (transcript, enabledTools)
        (self.schema, self.generationOptions) = (schema, generationOptions)
    }
}

public actor Sent {
    public private(set) var events: [LanguageModelExecutorGenerationChannel.Event] = []
    func add(_ event: LanguageModelExecutorGenerationChannel.Event) { events.append(event) }
}

public struct LanguageModelExecutorGenerationChannel: Sendable {
    public struct Response: Sendable {
        public enum Action: Sendable { case appendText(String, tokenCount: Int) }
    }

    public struct ToolCalls: Sendable {
        public enum Call: Sendable { case appendArguments(String, tokenCount: Int) }
        public enum Action: Sendable { case toolCall(id: String, name: String, action: Call) }
    }

    public enum Event: Sendable {
        case response(entryID: String? = nil, action: Response.Action)
        case toolCalls(entryID: String? = nil, action: ToolCalls.Action)
    }

    public let sent = Sent()

    public init() {}

    public func send(_ event: Event) async { await sent.add(event) }
}

public enum LanguageModelError: Error {
    public struct UnsupportedCapability: Sendable {
        public init(capability: LanguageModelCapabilities.Capability, debugDescription: String) {}
    }

    public struct UnsupportedGenerationGuide: Sendable {
        public init(schemaName: String?, debugDescription: String) {}
    }

    public struct UnsupportedTranscriptContent: Sendable {
        public init(unsupportedContent: [Transcript.Entry], debugDescription: String) {}
    }

    case unsupportedCapability(UnsupportedCapability)
    case unsupportedGenerationGuide(UnsupportedGenerationGuide)
    case unsupportedTranscriptContent(UnsupportedTranscriptContent)
}
