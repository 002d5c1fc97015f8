#if canImport(Darwin)
import Foundation
#if os(iOS)
import os
import UIKit
#endif

/// Heat and memory as the system reports them, for a session's budgets. Apple offers apps no reading of energy.
public enum AppleSensors {
    @Sendable public static func read() -> Readings {
        var readings = Readings()
        readings.headroom = headroom(ProcessInfo.processInfo.thermalState)
        #if os(iOS)
        readings.available = Int64(os_proc_available_memory())
        #endif
        return readings
    }

    /// Thermal headroom on Android's scale: at 1 the system throttles, on Apple's devices in the state `serious`.
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
    /// Returns half of the spare memory on each memory warning, between two tokens of an answer, until the session ends
    /// or the result is passed to `NotificationCenter.default.removeObserver`.
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
#endif
