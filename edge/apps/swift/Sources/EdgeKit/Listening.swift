import CEdge
import Foundation

#if canImport(AVFAudio)
import AVFAudio
#endif

/// What is said in a sound, piece by piece; see `EdgeSession.listen`.
///
///     let transcript = try await session.listen(hearing)
///     for samples in sound { for segment in try await transcript.hear(samples) { print(segment.text) } }
///     for segment in try await transcript.end() { print(segment.text) }
public final class Transcript: Sendable {
    private let session: EdgeSession
    private let ended = Locked<Finish?>(nil)

    init(_ session: EdgeSession) { self.session = session }

    /// Why the transcript has ended; nil before.
    public var finish: Finish? { ended.with { $0 } }

    /// Hears samples, mono, from -1 to 1; returns the segments that are complete.
    public func hear(_ samples: [Float]) async throws -> [Segment] {
        samples.isEmpty ? [] : try await run(samples)
    }

    /// The sound has ended: returns the rest of the segments.
    public func end() async throws -> [Segment] {
        try await run([])
    }

    private func run(_ samples: [Float]) async throws -> [Segment] {
        try await session.onQueue { handle in
            var found: [Segment] = []
            var taken = 0
            while self.finish == nil && (samples.isEmpty || taken < samples.count) {
                var native = edge_segment()
                native.size = UInt32(MemoryLayout<edge_segment>.size)
                try samples.withUnsafeBufferPointer { all in
                    try EdgeError.check {
                        let count = edge_hear(
                            handle, all.baseAddress.map { $0 + taken }, all.count - taken, &native, &$0)
                        taken += max(0, Int(count))
                        return count < 0 ? Int32(count) : 0
                    }
                }
                if native.length > 0 { found.append(Segment(native)) }
                if native.finish != 0 {
                    let reason = Finish(rawValue: Int32(native.finish)) ?? .interrupted
                    self.ended.with { $0 = reason }
                }
            }
            return found
        }
    }
}

#if canImport(AVFAudio)
extension AVAudioPCMBuffer {
    /// Float samples for `Transcript.hear`, the average of all channels; nil if the buffer has none: convert it with
    /// AVAudioConverter. Its rate must be the transcript's.
    public var edgeSamples: [Float]? {
        guard let channels = floatChannelData else { return nil }
        let count = Int(format.channelCount)
        return (0..<Int(frameLength)).map { frame in
            (0..<count).reduce(Float(0)) { $0 + channels[$1][frame * stride] } / Float(count)
        }
    }
}
#endif

extension EdgeSession {
    /// Begins a transcript, in place of the last one. `ears`: the path of ears.edge; nil: the package's own. Throws
    /// `.unsupported` if the bundle hears nothing.
    public func listen(_ hearing: Hearing, ears: String? = nil) async throws -> Transcript {
        guard let path = ears ?? EdgeModel.file("ears.edge") else {
            throw EdgeError(code: .unsupported, message: "the package hears nothing: export a Whisper model")
        }
        try await change { handle in
            try withSource(path) { source in
                try hearing.withNative { native in
                    try EdgeError.check { edge_listen(handle, &source, &native, &$0) }
                }
            }
        }
        return Transcript(self)
    }
}
