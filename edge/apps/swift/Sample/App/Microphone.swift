import AVFAudio
import EdgeKit
import Observation
import Speech

/// The microphone: its samples for a model that hears, or text by the system's own recognizer, on the device.
@MainActor @Observable
final class Microphone {
    private(set) var runs = false
    private var engine: AVAudioEngine?
    private var ended: (() -> Void)?

    /// Mono samples until `stop`, and their rate; nil if the person says no.
    func samples() async -> (AsyncStream<[Float]>, Int)? {
        let (stream, continuation) = AsyncStream.makeStream(of: [Float].self)
        let rate = await start { buffer in if let samples = buffer.edgeSamples { continuation.yield(samples) } }
        ended = { continuation.finish() }
        return rate.map { (stream, $0) }
    }

    /// Tells the text so far, until `stop`.
    func dictate(_ tell: @escaping @MainActor (String) -> Void) async {
        let allowed = await withCheckedContinuation { answer in
            SFSpeechRecognizer.requestAuthorization { @Sendable in answer.resume(returning: $0 == .authorized) }
        }
        guard allowed, let recognizer = SFSpeechRecognizer(), recognizer.supportsOnDeviceRecognition else { return }
        let heard = Heard()
        heard.request.requiresOnDeviceRecognition = true
        _ = await start { heard.request.append($0) }
        ended = { heard.request.endAudio() }
        recognizer.recognitionTask(with: heard.request) { @Sendable result, _ in
            guard let text = result?.bestTranscription.formattedString else { return }
            Task { @MainActor in tell(text) }
        }
    }

    func stop() {
        engine?.stop()
        engine?.inputNode.removeTap(onBus: 0)
        engine = nil
        ended?()
        ended = nil
        runs = false
    }

    private func start(_ take: @escaping @Sendable (AVAudioPCMBuffer) -> Void) async -> Int? {
        guard await AVAudioApplication.requestRecordPermission() else { return nil }
        let engine = AVAudioEngine()
        do {
            #if os(iOS)
            try AVAudioSession.sharedInstance().setCategory(.record)
            try AVAudioSession.sharedInstance().setActive(true)
            #endif
            let format = engine.inputNode.outputFormat(forBus: 0)
            engine.inputNode.installTap(onBus: 0, bufferSize: 4096, format: format) { @Sendable buffer, _ in
                take(buffer)  // on a thread of its own
            }
            try engine.start()
            self.engine = engine
            runs = true
            return Int(format.sampleRate)
        } catch {
            return nil
        }
    }
}

/// A request, which takes samples on any thread.
private final class Heard: @unchecked Sendable {
    let request = SFSpeechAudioBufferRecognitionRequest()
}
