import CEdge
import Foundation

#if canImport(AVFAudio)
import AVFAudio
#endif

extension EdgeModel {
    /// Tokens of a sound of so many samples, before it is encoded. `rate`: samples per second. Throws `.unsupported` if the
    /// bundle hears no sounds in prompts.
    public func soundTokens(count: Int, rate: Int) throws -> Int {
        guard let samples = UInt64(exactly: count), let pace = UInt32(exactly: rate) else {
            throw EdgeError(code: .badArgument, message: "a sound of \(count) samples, \(rate) a second")
        }
        var tokens: Int64 = 0
        try EdgeError.check {
            tokens = edge_sound_tokens(handle, samples, pace, &$0)
            return tokens < 0 ? Int32(tokens) : 0
        }
        return Int(tokens)
    }
}

extension EdgeSession {
    /// Plays a sound, mono samples from -1 to 1, which stands before the text that is asked or appended next, as a picture does.
    /// It is encoded now. `rate`: samples per second. `sounds`: the path of sounds.edge; nil: the package's own. Throws
    /// `.unsupported` if the bundle hears no sounds in prompts, `.full` if the sound does not fit.
    public func sound(_ samples: [Float], rate: Int, sounds: String? = nil) async throws {
        guard let path = sounds ?? EdgeModel.file("sounds.edge") else {
            throw EdgeError(code: .unsupported, message: "the package hears no sounds: export the model with --mmproj")
        }
        guard let pace = UInt32(exactly: rate) else {
            throw EdgeError(code: .badArgument, message: "rate is \(rate), but must not be negative")
        }
        try await change { handle in
            try withSource(path) { source in
                try samples.withUnsafeBufferPointer { all in
                    try EdgeError.check { edge_sound(handle, &source, all.baseAddress, all.count, pace, &$0) }
                }
            }
        }
    }

    #if canImport(AVFAudio)
    /// Plays a buffer of floats, the average of its channels.
    public func sound(_ buffer: AVAudioPCMBuffer, sounds: String? = nil) async throws {
        guard let samples = buffer.edgeSamples else {
            throw EdgeError(code: .badArgument, message: "the buffer has no floats: convert it with AVAudioConverter")
        }
        try await sound(samples, rate: Int(buffer.format.sampleRate), sounds: sounds)
    }
    #endif
}
