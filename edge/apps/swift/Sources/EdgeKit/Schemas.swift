import Foundation

/// A JSON schema: of a `Decodable` type, or built by hand.
///
///     struct Timer: Decodable { let minutes: Int; let label: String? }
///     let schema = try Schema(of: Timer.self).with("minutes", ["minimum": 1, "maximum": 600])
///     let same = Schema.object(["minutes": .integer(1...600), "label": .string], optional: ["label"])
public struct Schema: Sendable, Equatable, ExpressibleByDictionaryLiteral {
    /// Keys and their values, in the order in which they are written.
    let keys: [Entry]

    struct Entry: Sendable, Equatable {
        let name: String
        let value: Value
    }

    public indirect enum Value: Sendable, Equatable, ExpressibleByIntegerLiteral, ExpressibleByStringLiteral,
        ExpressibleByBooleanLiteral
    {
        case number(Int)
        case text(String)
        case flag(Bool)
        case schema(Schema)
        case list([Value])

        public init(integerLiteral value: Int) { self = .number(value) }
        public init(stringLiteral value: String) { self = .text(value) }
        public init(booleanLiteral value: Bool) { self = .flag(value) }
    }

    init(keys: [Entry]) { self.keys = keys }

    public init(dictionaryLiteral elements: (String, Value)...) {
        keys = elements.map { Entry(name: $0.0, value: $0.1) }
    }

    public static let string: Schema = ["type": "string"]
    public static let integer: Schema = ["type": "integer"]
    public static let number: Schema = ["type": "number"]
    public static let boolean: Schema = ["type": "boolean"]
    static let null: Schema = ["type": "null"]

    public static func integer(_ range: ClosedRange<Int>) -> Schema {
        ["type": "integer", "minimum": .number(range.lowerBound), "maximum": .number(range.upperBound)]
    }

    public static func oneOf(_ texts: [String]) -> Schema {
        ["enum": .list(texts.map { .text($0) })]
    }

    public static func array(of items: Schema) -> Schema {
        ["type": "array", "items": .schema(items)]
    }

    /// All properties but the `optional` ones are required; there are no others.
    public static func object(_ properties: KeyValuePairs<String, Schema>, optional: Set<String> = []) -> Schema {
        object(properties.map { ($0.key, $0.value) }, required: properties.map(\.key).filter { !optional.contains($0) })
    }

    static func object(_ properties: [(String, Schema)], required: [String]) -> Schema {
        [
            "type": "object",
            "properties": .schema(Schema(keys: properties.map { Entry(name: $0.0, value: .schema($0.1)) })),
            "required": .list(required.map { .text($0) }),
            "additionalProperties": false,
        ]
    }

    static func either(_ cases: [Schema]) -> Schema { ["anyOf": .list(cases.map { .schema($0) })] }

    /// Of a type whose `init(from:)` asks for its properties by keys, as the compiler writes it. Optional properties
    /// need not be there. Enums of texts are `CaseIterable`. Throws `.unsupported` for types without one: those that
    /// contain themselves, and such that look at the values they decode.
    public init<Decoded: Decodable>(of type: Decoded.Type) throws {
        self = try schema(of: type, within: [])
    }

    /// With more keys in the schema of a property, such as `["minimum": 1, "description": "how long"]`.
    public func with(_ property: String, _ more: Schema) -> Schema {
        Schema(
            keys: keys.map { key in
                guard key.name == "properties", case .schema(let all) = key.value else { return key }
                let changed = all.keys.map { each -> Entry in
                    guard each.name == property, case .schema(let own) = each.value else { return each }
                    return Entry(name: property, value: .schema(Schema(keys: own.keys + more.keys)))
                }
                return Entry(name: key.name, value: .schema(Schema(keys: changed)))
            })
    }

    /// As text.
    public var json: String { Self.text(.schema(self)) }

    private static func text(_ value: Value) -> String {
        switch value {
        case .number(let number): return "\(number)"
        case .flag(let flag): return "\(flag)"
        case .text(let text): return quoted(text)
        case .list(let values): return "[" + values.map(Self.text).joined(separator: ",") + "]"
        case .schema(let schema):
            return "{" + schema.keys.map { quoted($0.name) + ":" + Self.text($0.value) }.joined(separator: ",") + "}"
        }
    }

    static func quoted(_ text: String) -> String {
        let bytes = (try? JSONEncoder().encode([text])) ?? Data("[\"\"]".utf8)
        return String(decoding: bytes.dropFirst().dropLast(), as: UTF8.self)
    }
}

/// A function of the app that answers may call.
public struct Tool: Sendable {
    public let name: String
    public let about: String
    public let parameters: Schema

    public init(name: String, about: String, parameters: Schema) {
        (self.name, self.about, self.parameters) = (name, about, parameters)
    }

    var json: String {
        let function = [
            "\"name\":\(Schema.quoted(name))", "\"description\":\(Schema.quoted(about))",
            "\"parameters\":\(parameters.json)",
        ]
        return "{\"type\":\"function\",\"function\":{\(function.joined(separator: ","))}}"
    }
}

extension EdgeSession {
    /// As `tools(_:)` of a JSON text; none: no tools.
    public func tools(_ tools: [Tool]) async throws {
        try await self.tools(tools.isEmpty ? nil : "[" + tools.map(\.json).joined(separator: ",") + "]")
    }

    /// Sets the form of the next and later answers; see `constrain(_:_:)`.
    public func constrain(_ schema: Schema) async throws {
        try await constrain(.jsonSchema, schema.json)
    }

    /// The answer to a prompt as a value: it is constrained to the schema of its type, and later ones are free. Throws
    /// `DecodingError` if it was cut before its end.
    public func respond<Decoded: Decodable & Sendable>(
        to prompt: String, as type: Decoded.Type, _ schema: Schema? = nil
    ) async throws -> Decoded {
        try await constrain(schema ?? Schema(of: type))
        let answer: Result<String, any Error>
        do { answer = .success(try await respond(to: prompt)) } catch { answer = .failure(error) }
        try await constrain(.free)
        return try JSONDecoder().decode(type, from: Data(answer.get().utf8))
    }
}

// ---- types, by what their decoding asks for ----------------------------------------------------------------------

private func schema(of type: any Decodable.Type, within outer: [any Decodable.Type]) throws -> Schema {
    switch type {
    case is String.Type: return .string
    case is Bool.Type: return .boolean
    case is Double.Type, is Float.Type: return .number
    case let integer as any FixedWidthInteger.Type: return integers(integer)
    case let optional as any OptionalType.Type:
        return .either([try schema(of: optional.wrapped, within: outer), .null])
    case let list as any ListType.Type: return .array(of: try schema(of: list.element, within: outer))
    case let choice as any CaseIterable.Type:
        let texts = texts(choice)
        if !texts.isEmpty { return .oneOf(texts) }
    default: break
    }
    if outer.contains(where: { $0 == type }) { throw unsupported("\(type) contains itself") }
    let asked = Asked(within: outer + [type])
    do { _ = try type.init(from: Recorder(asked: asked)) } catch let error as EdgeError { throw error } catch {
        throw unsupported("\(type) looks at the values that it decodes: make its Schema by hand")
    }
    guard !asked.properties.isEmpty else { throw unsupported("\(type) has no keys") }
    return .object(asked.properties, required: asked.required)
}

private func integers<Number: FixedWidthInteger>(_ type: Number.Type) -> Schema {
    guard let least = Int(exactly: type.min), let most = Int(exactly: type.max) else { return .integer }
    return Number.bitWidth < 64 ? .integer(least...most) : .integer
}

private func texts<Choice: CaseIterable>(_ type: Choice.Type) -> [String] {
    type.allCases.compactMap { ($0 as? any RawRepresentable)?.rawValue as? String }
}

private func unsupported(_ message: String) -> EdgeError {
    EdgeError(code: .unsupported, message: "no schema says this: \(message)")
}

private protocol OptionalType { static var wrapped: any Decodable.Type { get } }
extension Optional: OptionalType where Wrapped: Decodable {
    fileprivate static var wrapped: any Decodable.Type { Wrapped.self }
}

private protocol ListType { static var element: any Decodable.Type { get } }
extension Array: ListType where Element: Decodable {
    fileprivate static var element: any Decodable.Type { Element.self }
}

/// What a type asked for, in its order.
private final class Asked {
    let within: [any Decodable.Type]
    var properties: [(String, Schema)] = []
    var required: [String] = []

    init(within: [any Decodable.Type]) { self.within = within }

    func note(_ key: any CodingKey, _ type: any Decodable.Type, optional: Bool) throws {
        properties.append((key.stringValue, try schema(of: type, within: within)))
        if !optional { required.append(key.stringValue) }
    }
}

/// Decodes values that mean nothing, and notes the types.
private struct Recorder: Decoder {
    let asked: Asked
    var codingPath: [any CodingKey] { [] }
    var userInfo: [CodingUserInfoKey: Any] { [:] }

    func container<Key: CodingKey>(keyedBy type: Key.Type) -> KeyedDecodingContainer<Key> {
        KeyedDecodingContainer(Keyed(asked: asked))
    }

    func unkeyedContainer() throws -> any UnkeyedDecodingContainer { throw unsupported("a list without keys") }

    func singleValueContainer() throws -> any SingleValueDecodingContainer {
        throw unsupported("a single value that is no number, text or enum of texts with CaseIterable")
    }
}

private struct Keyed<Key: CodingKey>: KeyedDecodingContainerProtocol {
    let asked: Asked
    var codingPath: [any CodingKey] { [] }
    var allKeys: [Key] { [] }

    func contains(_ key: Key) -> Bool { true }

    func decodeNil(forKey key: Key) -> Bool { true }

    func decode<Value: Decodable>(_ type: Value.Type, forKey key: Key) throws -> Value {
        try asked.note(key, type, optional: false)
        return try anyValue(type, within: asked.within)
    }

    func decodeIfPresent<Value: Decodable>(_ type: Value.Type, forKey key: Key) throws -> Value? {
        try absent(type, key)
    }

    // For these, the protocol's own functions would be called: they decode, and note nothing.
    func decodeIfPresent(_ type: Bool.Type, forKey key: Key) throws -> Bool? { try absent(type, key) }
    func decodeIfPresent(_ type: String.Type, forKey key: Key) throws -> String? { try absent(type, key) }
    func decodeIfPresent(_ type: Double.Type, forKey key: Key) throws -> Double? { try absent(type, key) }
    func decodeIfPresent(_ type: Float.Type, forKey key: Key) throws -> Float? { try absent(type, key) }
    func decodeIfPresent(_ type: Int.Type, forKey key: Key) throws -> Int? { try absent(type, key) }
    func decodeIfPresent(_ type: Int8.Type, forKey key: Key) throws -> Int8? { try absent(type, key) }
    func decodeIfPresent(_ type: Int16.Type, forKey key: Key) throws -> Int16? { try absent(type, key) }
    func decodeIfPresent(_ type: Int32.Type, forKey key: Key) throws -> Int32? { try absent(type, key) }
    func decodeIfPresent(_ type: Int64.Type, forKey key: Key) throws -> Int64? { try absent(type, key) }
    func decodeIfPresent(_ type: UInt.Type, forKey key: Key) throws -> UInt? { try absent(type, key) }
    func decodeIfPresent(_ type: UInt8.Type, forKey key: Key) throws -> UInt8? { try absent(type, key) }
    func decodeIfPresent(_ type: UInt16.Type, forKey key: Key) throws -> UInt16? { try absent(type, key) }
    func decodeIfPresent(_ type: UInt32.Type, forKey key: Key) throws -> UInt32? { try absent(type, key) }
    func decodeIfPresent(_ type: UInt64.Type, forKey key: Key) throws -> UInt64? { try absent(type, key) }

    private func absent<Value: Decodable>(_ type: Value.Type, _ key: Key) throws -> Value? {
        try asked.note(key, type, optional: true)
        return nil
    }

    func nestedContainer<Nested: CodingKey>(
        keyedBy type: Nested.Type, forKey key: Key
    ) throws -> KeyedDecodingContainer<Nested> { throw unsupported("containers within \(key.stringValue)") }

    func nestedUnkeyedContainer(forKey key: Key) throws -> any UnkeyedDecodingContainer {
        throw unsupported("containers within \(key.stringValue)")
    }

    func superDecoder() throws -> any Decoder { throw unsupported("a superclass") }
    func superDecoder(forKey key: Key) throws -> any Decoder { throw unsupported("a superclass") }
}

/// A value of a type: the first of an enum, zero, nothing.
private func anyValue<Value: Decodable>(_ type: Value.Type, within outer: [any Decodable.Type]) throws -> Value {
    if let choice = type as? any CaseIterable.Type, let first = first(choice) as? Value { return first }
    for text in ["0", "\"\"", "false", "[]", "null"] {
        if let value = try? JSONDecoder().decode([Value].self, from: Data("[\(text)]".utf8)).first { return value }
    }
    return try type.init(from: Recorder(asked: Asked(within: outer + [type])))
}

private func first<Choice: CaseIterable>(_ type: Choice.Type) -> Any? { type.allCases.first }
