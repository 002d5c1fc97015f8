import EdgeKit
import SwiftUI

/// A chat: answers appear as they are generated, the button cancels them, a line shows memory.
@MainActor
final class Chat: ObservableObject {
    @Published var conversation = ""
    @Published var status = "Loading"
    @Published var answering = false
    private var session: EdgeSession?
    private var answer: Task<Void, Never>?

    func open() async {
        guard session == nil else { return }
        do {
            var options = EdgeOptions()
            options.headroom = 0.9
            let opened = try await Task.detached { [options] in try EdgeModel().session(options) }.value
            session = opened
            status = "Ready"
            #if os(iOS)
            opened.trimOnMemoryWarnings()
            #endif
        } catch {
            status = error.localizedDescription
        }
    }

    func ask(_ question: String) {
        guard let session, !question.isEmpty else { return }
        conversation += "\n> \(question)\n"
        answering = true
        answer = Task {
            do {
                for try await text in session.answer(to: question) { conversation += text }
            } catch {
                conversation += "\n\(error.localizedDescription)\n"
            }
            let use = session.usage()
            let mebibytes = (use.weights + use.kv + use.scratch) >> 20
            status = "\(mebibytes) MiB, \(use.rows) of \(use.capacity) rows, \(use.joules.formatted()) J estimated"
            answering = false
        }
    }

    func cancel() {
        answer?.cancel()
    }
}

struct ChatView: View {
    @StateObject private var chat = Chat()
    @State private var question = ""

    var body: some View {
        VStack(alignment: .leading) {
            ScrollView {
                Text(chat.conversation).frame(maxWidth: .infinity, alignment: .leading)
            }
            Text(chat.status).font(.footnote).foregroundColor(.secondary)
            HStack {
                TextField("Question", text: $question).onSubmit(send)
                if chat.answering {
                    Button("Cancel", action: chat.cancel)
                } else {
                    Button("Send", action: send).disabled(question.isEmpty)
                }
            }
        }
        .padding()
        .task { await chat.open() }
    }

    private func send() {
        chat.ask(question)
        question = ""
    }
}
