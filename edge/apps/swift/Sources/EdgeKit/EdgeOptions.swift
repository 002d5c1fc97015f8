import CEdge
import Foundation

/// Options of a session, as `edge run` has them.
public struct EdgeOptions: Hashable, Sendable {
    // generated: Options

    public init() {}

    func withNative<Value>(_ body: (inout edge_options) throws -> Value) throws -> Value {
        let texts = stop.map { strdup($0) }
        let isaText = isa.flatMap { strdup($0) }
        let cacheText = cache.flatMap { strdup($0) }
        let npuText = npu.flatMap { strdup($0) }
        defer {
            for text in texts { free(text) }
            free(isaText)
            free(cacheText)
            free(npuText)
        }
        return try texts.map { UnsafePointer<CChar>($0) }.withUnsafeBufferPointer { pointers in
            var native = edge_options()
            native.size = UInt32(MemoryLayout<edge_options>.size)
            native.isa = UnsafePointer<CChar>(isaText)
            native.cache = UnsafePointer<CChar>(cacheText)
            native.npu = UnsafePointer<CChar>(npuText)
            native.stop = pointers.baseAddress
            native.stop_count = UInt32(pointers.count)
            // generated: OptionsNative
            return try body(&native)
        }
    }
}

/// What computes; see `EdgeOptions.engine`.
public enum Engine: UInt32, Sendable {
    // generated: Engine
}

/// Whether drafts of repeated text are verified; see `EdgeOptions.speculate`.
public enum Speculate: UInt32, Sendable {
    // generated: Speculate
}

/// The role of a text.
public enum Role: Int32, Sendable {
    // generated: Role
}

/// The form of answers: any text; JSON that matches a schema; text that matches a regular expression as a whole.
public enum Form: Int32, Sendable {
    // generated: Form
}

/// Why an answer ended, in the order of edge.h.
public enum Finish: Int32, Sendable {
    // generated: Finish
}

/// A part of an answer: whole characters, perhaps none. `token` is -1 for the rest of a text, and while the prompt
/// runs, of whose `asked` tokens `done` have run.
public struct Piece: Sendable {
    public let text: String
    public let token: Int32
    public let finish: Finish
    public let done: Int
    public let asked: Int
}

/// The memory that a trim returns: unused pages; half of the rows that can be spared, too; all of them.
public enum Trim: Int32, Sendable {
    // generated: Trim
}

/// Measurements of the app; nil: unknown.
public struct Readings: Sendable {
    // generated: Readings

    public init() {}

    var native: edge_readings {
        var native = edge_readings()
        native.size = UInt32(MemoryLayout<edge_readings>.size)
        // generated: ReadingsNative
        return native
    }
}

/// How a sound is heard. `rate`: samples per second, from 1000 to 192000.
public struct Hearing: Sendable {
    // generated: Hearing

    public init() {}

    func withNative<Value>(_ body: (inout edge_hearing) throws -> Value) throws -> Value {
        let languageText = language.flatMap { strdup($0) }
        let promptText = prompt.flatMap { strdup($0) }
        defer {
            free(languageText)
            free(promptText)
        }
        var native = edge_hearing()
        native.size = UInt32(MemoryLayout<edge_hearing>.size)
        native.language = UnsafePointer<CChar>(languageText)
        native.prompt = UnsafePointer<CChar>(promptText)
        // generated: HearingNative
        return try body(&native)
    }
}

/// A part of a transcript.
public struct Segment: Sendable {
    // generated: Segment

    init(_ native: edge_segment) {
        // generated: SegmentRead
    }
}

/// A model and its plan.
public struct ModelInfo: Sendable {
    // generated: ModelInfo

    init(_ native: edge_model_info) {
        // generated: ModelInfoRead
    }
}

/// The resources that a session uses.
public struct Usage: Sendable {
    // generated: Usage

    init(_ native: edge_usage) {
        // generated: UsageRead
    }
}

/// Why a call failed. The message is one line that says what was wrong and what to do.
public struct EdgeError: Error, LocalizedError, Sendable {
    public enum Code: Int32, Sendable {
        // generated: Status
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
        throw EdgeError(code: Code(rawValue: status) ?? .failed, message: named(message))
    }

    /// With Swift's names of what the library names.
    static func named(_ message: String) -> String {
        let words = message.split(separator: " ", omittingEmptySubsequences: false).map { word -> String in
            let name = word.prefix { $0.isLetter || $0 == "_" || $0 == "." }
            return names[String(name)].map { $0 + word.dropFirst(name.count) } ?? String(word)
        }
        return words.joined(separator: " ")
    }
}

private let names = [
    // generated: Names
]
