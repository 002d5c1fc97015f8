/** The parts of Android that the Kotlin binding uses, as its documentation declares them, with values for tests. */
package android.app

class ActivityManager {
    class MemoryInfo {
        @JvmField var availMem = 0L
        @JvmField var threshold = 0L
    }

    fun getMemoryInfo(outInfo: MemoryInfo) {
        outInfo.availMem = available
        outInfo.threshold = 300
    }

    companion object {
        var available = 1000L
    }
}
