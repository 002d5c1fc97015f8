import Foundation
#if os(iOS)
import os
import UIKit
#endif

/// What the system says about heat and memory, for a session's budgets. Apple gives apps no reading of energy.
public enum AppleSensors {
    @Sendable public static func read() -> Readings {
        var readings = Readings()
        readings.headroom = headroom(ProcessInfo.processInfo.thermalState)
        #if os(iOS)
        readings.available = Int64(os_proc_available_memory())
        #endif
        return readings
    }

    /// On Android's scale, where 1 is where the system throttles, which Apple's does in the state `serious`.
    static func headroom(_ state: ProcessInfo.ThermalState) -> Double? {
        switch state {
        case .nominal: return 0
        case .fair: return 0.8
        case .serious: return 1
        case .critical: return 1.2
        @unknown default: return nil
        }
    }
}

#if os(iOS)
extension EdgeSession {
    /// Gives half of what can be spared back on each memory warning, between two tokens if an answer is generated;
    /// until the session ends, or the result goes to `NotificationCenter.default.removeObserver`.
    @MainActor @discardableResult
    public func trimOnMemoryWarnings() -> NSObjectProtocol {
        NotificationCenter.default.addObserver(
            forName: UIApplication.didReceiveMemoryWarningNotification, object: nil, queue: nil
        ) { [weak self] _ in
            guard let self else { return }
            DispatchQueue.global().async { try? self.trim(.half) }
        }
    }
}
#endif
