import EdgeKit
import ImageIO
import PhotosUI
import SwiftUI

/// A chat: answers appear as they are generated; pictures, speech, a timer and a form.
struct ChatView: View {
    @Bindable var conversation: Conversation
    @State private var question = ""
    @State private var mode = Mode.chat
    @State private var picked: PhotosPickerItem?
    @State private var microphone = Microphone()

    var body: some View {
        VStack(spacing: 8) {
            turns
            Text(conversation.status).font(.footnote).foregroundStyle(.secondary)
            tools
            composer
        }
        .padding()
        .task { await conversation.open() }
        .onChange(of: picked) { Task { await show(picked) } }
    }

    private var turns: some View {
        ScrollView {
            LazyVStack(alignment: .leading, spacing: 8) {
                ForEach(conversation.turns) { TurnView(turn: $0) }
            }
        }
        .defaultScrollAnchor(.bottom)
    }

    private var tools: some View {
        HStack {
            if conversation.modes.count > 1 {
                Picker("Mode", selection: $mode) {
                    ForEach(conversation.modes, id: \.self) { Text($0.rawValue.capitalized) }
                }
                .pickerStyle(.segmented)
            }
            if conversation.sees {
                PhotosPicker(selection: $picked, matching: .images) {
                    Image(systemName: conversation.hasPicture ? "photo.fill" : "photo").accessibilityLabel("Picture")
                }
            }
            Button(action: speak) {
                Image(systemName: microphone.runs ? "mic.fill" : "mic").accessibilityLabel("Speak")
            }
        }
    }

    private var composer: some View {
        HStack {
            TextField(hint, text: $question, axis: .vertical)
                .textFieldStyle(.roundedBorder)
                .submitLabel(.send)
                .onSubmit(send)
                .disabled(conversation.hears)
            if conversation.phase == .answering && !conversation.hears {
                Button("Stop", action: conversation.cancel)
            } else {
                Button("Send", action: send).disabled(question.isEmpty || conversation.phase != .ready)
            }
        }
    }

    private var hint: String {
        switch mode {
        case .chat: return "Question"
        case .timer: return "Wake me in 20 minutes"
        case .form: return "A table for 4 on Friday, for Ada"
        }
    }

    private func send() {
        conversation.ask(question, mode)
        question = ""
    }

    private func speak() {
        if microphone.runs { return microphone.stop() }
        Task {
            if conversation.hears {
                guard let (sound, rate) = await microphone.samples() else { return }
                conversation.listen(to: sound, rate: rate)
            } else {
                await microphone.dictate { question = $0 }
            }
        }
    }

    private func show(_ item: PhotosPickerItem?) async {
        guard let data = try? await item?.loadTransferable(type: Data.self), let image = upright(data),
            let pixels = try? Pixels(image)
        else { return }
        conversation.show(pixels)
    }
}

private struct TurnView: View {
    let turn: Turn

    var body: some View {
        VStack(alignment: .leading) {
            Text(turn.text).textSelection(.enabled)
            ForEach(turn.fields, id: \.label) { field in
                LabeledContent(field.label, value: field.value)
            }
        }
        .padding(10)
        .background(color, in: .rect(cornerRadius: 14))
        .frame(maxWidth: .infinity, alignment: turn.by == .person ? .trailing : .leading)
    }

    private var color: Color {
        switch turn.by {
        case .person: return .accentColor.opacity(0.2)
        case .model: return .gray.opacity(0.15)
        case .app: return .green.opacity(0.15)
        }
    }
}

/// Of a file's picture, at most 1,024 pixels wide and high, turned as its camera was held.
private func upright(_ data: Data) -> CGImage? {
    let options: [CFString: Any] = [
        kCGImageSourceCreateThumbnailFromImageAlways: true, kCGImageSourceCreateThumbnailWithTransform: true,
        kCGImageSourceThumbnailMaxPixelSize: 1024,
    ]
    return CGImageSourceCreateWithData(data as CFData, nil).flatMap {
        CGImageSourceCreateThumbnailAtIndex($0, 0, options as CFDictionary)
    }
}
