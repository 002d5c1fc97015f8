import CEdge

extension EdgeSession {
    /// The embedding of a text, of `info.dimensions` values; the first `dimensions` if that is not 0. `prompt`: the
    /// name of one of the model's, such as query or document, to stand before the text. `normalize`: scale to length 1.
    /// `truncate`: leave out the end of a text that is longer than the cache. Forgets the conversation. Throws
    /// `.unsupported` if the bundle makes no embeddings, `.full` for a text that is too long.
    public func embed(
        _ text: String, prompt: String? = nil, dimensions: Int = 0, normalize: Bool = true, truncate: Bool = false
    ) async throws -> [Float] {
        try await embed([text], prompt: prompt, dimensions: dimensions, normalize: normalize, truncate: truncate)[0]
    }

    /// Of several texts, which takes less time than one after the other.
    public func embed(
        _ texts: [String], prompt: String? = nil, dimensions: Int = 0, normalize: Bool = true, truncate: Bool = false
    ) async throws -> [[Float]] {
        let size = dimensions > 0 ? dimensions : model.info.dimensions
        return try await change { handle in
            var lengths = texts.map(\.utf8.count)
            let bytes = texts.flatMap { $0.utf8.map { CChar(bitPattern: $0) } }
            var vectors = [Float](repeating: 0, count: texts.count * size)
            func call(_ name: UnsafePointer<CChar>?) throws {
                try bytes.withUnsafeBufferPointer { all in
                    var at = 0
                    var starts = lengths.map { length -> UnsafePointer<CChar>? in
                        defer { at += length }
                        return all.baseAddress.map { $0 + at }
                    }
                    var options = edge_embedding()
                    options.size = UInt32(MemoryLayout<edge_embedding>.size)
                    options.prompt = name
                    options.dimensions = UInt32(clamping: dimensions)
                    options.unscaled = normalize ? 0 : 1
                    options.truncate = truncate ? 1 : 0
                    try EdgeError.check {
                        edge_embed(handle, &starts, &lengths, texts.count, &options, &vectors, vectors.count, &$0)
                    }
                }
            }
            if let prompt {
                try prompt.withCString { try call($0) }
            } else {
                try call(nil)
            }
            return texts.indices.map { Array(vectors[$0 * size..<($0 + 1) * size]) }
        }
    }
}
