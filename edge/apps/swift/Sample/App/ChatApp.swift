import SwiftUI
import UserNotifications

@main
struct ChatApp: App {
    @Environment(\.scenePhase) private var phase
    @State private var conversation = Conversation(
        file: URL.applicationSupportDirectory.appending(path: "conversation"), setTimer: notify)

    var body: some Scene {
        WindowGroup { ChatView(conversation: conversation) }
            .onChange(of: phase) {
                if phase == .background { Task { await keep() } }  // the process may end from here on
            }
    }

    private func keep() async {
        try? FileManager.default.createDirectory(at: .applicationSupportDirectory, withIntermediateDirectories: true)
        await conversation.keep()
    }
}

/// Sets a timer that goes on without this app.
@MainActor
private func notify(minutes: Int) {
    Task {
        let center = UNUserNotificationCenter.current()
        guard try await center.requestAuthorization(options: [.alert, .sound]) else { return }
        let content = UNMutableNotificationContent()
        content.title = "\(minutes) minutes are over"
        content.sound = .default
        let trigger = UNTimeIntervalNotificationTrigger(timeInterval: TimeInterval(60 * minutes), repeats: false)
        try await center.add(UNNotificationRequest(identifier: UUID().uuidString, content: content, trigger: trigger))
    }
}
