package android.os

class BatteryManager {
    fun getLongProperty(id: Int): Long = if (id == BATTERY_PROPERTY_CURRENT_NOW) current else Long.MIN_VALUE

    companion object {
        const val BATTERY_PROPERTY_CURRENT_NOW = 2
        const val EXTRA_PLUGGED = "plugged"
        const val EXTRA_TEMPERATURE = "temperature"
        const val EXTRA_VOLTAGE = "voltage"
        var current = Long.MIN_VALUE
    }
}

object Build {
    object VERSION {
        @JvmField var SDK_INT = 34
    }

    object VERSION_CODES {
        const val R = 30
        const val S = 31
    }
}

class PerformanceHintManager {
    fun createHintSession(tids: IntArray, initialTargetWorkDurationNanos: Long): Session? =
        if (refuses) null else Session().also { told += "create ${tids.toList()} ${initialTargetWorkDurationNanos > 0}" }

    class Session {
        fun updateTargetWorkDuration(nanos: Long) { told += "target $nanos" }
        fun reportActualWorkDuration(nanos: Long) { told += "ran $nanos" }
        fun close() { told += "close" }
    }

    companion object {
        var refuses = false
        val told = mutableListOf<String>()
    }
}

class PowerManager {
    fun getThermalHeadroom(forecastSeconds: Int): Float {
        asked++
        return if (forecastSeconds in 0..60) headroom else Float.NaN
    }

    companion object {
        var headroom = Float.NaN
        var asked = 0
    }
}
