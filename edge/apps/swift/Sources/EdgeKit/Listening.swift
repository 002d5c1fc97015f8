import CEdge
import Foundation
#if canImport(AVFAudio)
import AVFAudio
#endif

/// What is said in a sound, piece by piece; see `EdgeSession.listen`.
///
///     let transcript = try session.listen(hearing)
///     for buffer in buffers { for segment in try transcript.hear(buffer) { print(segment.text) } }
///     for segment in try transcript.end() { print(segment.text) }
public final class Transcript {
    private let session: EdgeSession
    /// Why the transcript has ended; nil before.
    public private(set) var finish: Finish?

    init(_ session: EdgeSession) { self.session = session }

    /// Hears samples, mono, from -1 to 1; returns the segments that are complete. Blocks while a window is heard.
    public func hear(_ samples: [Float]) throws -> [Segment] {
        try samples.withUnsafeBufferPointer { try samples.isEmpty ? [] : hear($0) }
    }

    /// The sound has ended: returns the rest of the segments.
    public func end() throws -> [Segment] {
        try hear(UnsafeBufferPointer(start: nil, count: 0))
    }

    #if canImport(AVFAudio)
    /// Hears a buffer of float samples, whose channels are averaged. Its rate must be the transcript's.
    public func hear(_ buffer: AVAudioPCMBuffer) throws -> [Segment] {
        guard let channels = buffer.floatChannelData else {
            throw EdgeError(code: .badArgument, message: "the buffer has no float samples: convert it with AVAudioConverter")
        }
        let count = Int(buffer.format.channelCount), step = buffer.stride
        return try hear((0 ..< Int(buffer.frameLength)).map { frame in
            (0 ..< count).reduce(Float(0)) { $0 + channels[$1][frame * step] } / Float(count)
        })
    }
    #endif

    private func hear(_ samples: UnsafeBufferPointer<Float>) throws -> [Segment] {
        var found: [Segment] = []
        var taken = 0
        guard finish == nil else { return found }
        repeat {
            let rest = samples.baseAddress.map { $0 + taken }
            let (count, segment, reason) = try session.hear(rest, samples.count - taken)
            taken += count
            if let segment { found.append(segment) }
            finish = reason
            if taken == samples.count && samples.count > 0 { break } // a call without any would end the sound
        } while finish == nil
        return found
    }
}

extension EdgeSession {
    /// Begins a transcript, in place of the last one. `ears`: the path of ears.edge; nil: the package's own. Throws
    /// `.unsupported` if the bundle hears nothing.
    public func listen(_ hearing: Hearing, ears: String? = nil) throws -> Transcript {
        guard let path = ears ?? Bundle.module.path(forResource: "ears", ofType: "edge") else {
            throw EdgeError(code: .unsupported, message: "the package hears nothing: export a Whisper model")
        }
        try onQueue { handle in
            try path.withCString { path in
                var source = edge_source()
                source.size = UInt32(MemoryLayout<edge_source>.size)
                source.path = path
                source.fd = -1
                try hearing.withNative { native in
                    try EdgeError.check { edge_listen(handle, &source, &native, &$0) }
                }
            }
        }
        return Transcript(self)
    }

    func hear(_ samples: UnsafePointer<Float>?, _ count: Int) throws -> (Int, Segment?, Finish?) {
        try onQueue { handle in
            var native = edge_segment()
            native.size = UInt32(MemoryLayout<edge_segment>.size)
            var taken: Int64 = 0
            try EdgeError.check {
                taken = edge_hear(handle, samples, count, &native, &$0)
                return taken < 0 ? Int32(taken) : 0
            }
            let reason = native.finish == 0 ? nil : Finish(rawValue: Int32(native.finish)) ?? .interrupted
            return (Int(taken), native.length > 0 ? Segment(native) : nil, reason)
        }
    }
}
