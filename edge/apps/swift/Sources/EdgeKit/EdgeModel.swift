import CEdge
import Foundation

/// A model of a bundle that `edge export` made: model.edge, mapped into memory.
///
///     let session = try EdgeModel().session()
///     for try await text in session.answer(to: "Why is the sky blue?") { print(text, terminator: "") }
///
/// It is unmapped when its last session ends.
public final class EdgeModel: @unchecked Sendable {
    let handle: OpaquePointer
    public let info: ModelInfo

    /// The path of a file of the package, such as `eyes.edge`; nil if it has none.
    public static func file(_ name: String) -> String? {
        Bundle.module.path(forResource: name, ofType: nil)
    }

    /// The package's own model.
    public convenience init() throws {
        guard let path = EdgeModel.file("model.edge") else {
            throw EdgeError(code: .badFile, message: "the package has no model.edge: copy the whole folder")
        }
        try self.init(path: path)
    }

    /// Throws `EdgeError` with `.badFile` if there is no model.edge of this version.
    public init(path: String) throws {
        var opened: OpaquePointer?
        try withSource(path) { source in try EdgeError.check { edge_open(&source, &opened, &$0) } }
        guard let opened else { throw EdgeError(code: .noMemory, message: "there is no memory for the model") }
        handle = opened
        var found = edge_model_info()
        found.size = UInt32(MemoryLayout<edge_model_info>.size)
        _ = edge_info(opened, &found, nil)
        info = ModelInfo(found)
    }

    deinit {
        _ = edge_close(handle, nil)
    }

    /// The system's own sensors: `AppleSensors` on Apple's systems, none elsewhere.
    public static var systemSensors: (@Sendable () -> Readings)? {
        #if canImport(Darwin)
        return AppleSensors.read
        #else
        return nil
        #endif
    }

    /// A conversation, whose memory is allocated now. `sensors` is called about twice a second while it generates.
    public func session(
        _ options: EdgeOptions = EdgeOptions(), sensors: (@Sendable () -> Readings)? = EdgeModel.systemSensors
    ) throws -> EdgeSession {
        try EdgeSession(self, options, sensors)
    }
}

/// Calls `body` with the file at this path.
func withSource<Result>(_ path: String, _ body: (inout edge_source) throws -> Result) rethrows -> Result {
    try path.withCString { path in
        var source = edge_source()
        source.size = UInt32(MemoryLayout<edge_source>.size)
        source.path = path
        source.fd = -1
        return try body(&source)
    }
}
