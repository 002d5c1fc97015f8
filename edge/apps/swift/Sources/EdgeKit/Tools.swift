import CEdge
import Foundation

/// A call of a tool, with its identifier in the conversation.
public struct ToolCall: Sendable {
    public let id: String
    public let name: String
    /// A JSON object.
    public let arguments: String

    /// The arguments as a value of the app.
    public func decoded<Value: Decodable>(_ type: Value.Type = Value.self) throws -> Value {
        try JSONDecoder().decode(type, from: Data(arguments.utf8))
    }
}

extension EdgeSession {
    /// States the functions of the app that answers may call, before the conversation begins: a JSON array in the form of
    /// OpenAI's protocol; nil: none. Throws `.unsupported` if the model's chat template writes tools in a notation that apps
    /// lack, `.badArgument` for tools that are malformed.
    public func tools(_ json: String?) async throws {
        try await onQueue { handle in
            guard let json else { return try EdgeError.check { edge_tools(handle, nil, 0, &$0) } }
            try json.withCString { text in
                try EdgeError.check { edge_tools(handle, text, json.utf8.count, &$0) }
            }
        }
    }

    /// What the next and later answers may call: auto, none, required, or the name of the one function that they must call.
    /// Calls that must be made, and those of tools that are `strict`, match their schemas. `parallel`: several calls may follow
    /// each other.
    public func choose(_ choice: String, parallel: Bool = true) async throws {
        try await onQueue { handle in
            try choice.withCString { text in
                try EdgeError.check { edge_choose(handle, text, parallel ? 1 : 0, &$0) }
            }
        }
    }

    /// The calls of the last answer, whose `finish` then is `.toolCalls`. The result of each is appended as `.result`, in their
    /// order.
    public func calls() async throws -> [ToolCall] {
        try await onQueue { handle in
            var count: Int64 = 0
            try EdgeError.check { error in
                count = edge_calls(handle, 0, nil, &error)
                return Int32(clamping: count)
            }
            return try (0..<count).map { index in
                var call = edge_call()
                call.size = UInt32(MemoryLayout<edge_call>.size)
                try EdgeError.check { Int32(clamping: edge_calls(handle, UInt32(index), &call, &$0)) }
                return ToolCall(
                    id: String(cString: call.id), name: String(cString: call.name),
                    arguments: String(cString: call.arguments))
            }
        }
    }
}
