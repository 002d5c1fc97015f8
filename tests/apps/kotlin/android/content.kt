package android.content

import android.app.ActivityManager
import android.content.pm.PackageManager
import android.content.res.AssetManager
import android.content.res.Configuration
import android.os.BatteryManager
import android.os.PerformanceHintManager
import android.os.PowerManager
import java.io.File

interface ComponentCallbacks {
    fun onConfigurationChanged(newConfig: Configuration)
    fun onLowMemory()
}

interface ComponentCallbacks2 : ComponentCallbacks {
    fun onTrimMemory(level: Int)

    companion object {
        const val TRIM_MEMORY_RUNNING_MODERATE = 5
        const val TRIM_MEMORY_RUNNING_LOW = 10
        const val TRIM_MEMORY_RUNNING_CRITICAL = 15
        const val TRIM_MEMORY_UI_HIDDEN = 20
        const val TRIM_MEMORY_BACKGROUND = 40
        const val TRIM_MEMORY_MODERATE = 60
        const val TRIM_MEMORY_COMPLETE = 80
    }
}

class Intent(val extras: Map<String, Int>) {
    fun getIntExtra(name: String, defaultValue: Int) = extras[name] ?: defaultValue

    companion object {
        const val ACTION_BATTERY_CHANGED = "android.intent.action.BATTERY_CHANGED"
    }
}

class IntentFilter(val action: String)

abstract class BroadcastReceiver

open class Context {
    val applicationContext: Context get() = this
    val packageManager = PackageManager()
    val packageName = "com.example.chat"
    val assets = AssetManager()
    val noBackupFilesDir = File(System.getProperty("java.io.tmpdir"), "no_backup")
    val callbacks = mutableListOf<ComponentCallbacks>()
    var batteryState: Intent? = null

    fun getSystemService(name: String): Any? = when (name) {
        BATTERY_SERVICE -> BatteryManager()
        POWER_SERVICE -> PowerManager()
        ACTIVITY_SERVICE -> ActivityManager()
        PERFORMANCE_HINT_SERVICE -> PerformanceHintManager()
        else -> null
    }

    fun registerReceiver(receiver: BroadcastReceiver?, filter: IntentFilter): Intent? =
        batteryState.takeIf { receiver == null && filter.action == Intent.ACTION_BATTERY_CHANGED }

    fun registerComponentCallbacks(callback: ComponentCallbacks) {
        callbacks += callback
    }

    fun unregisterComponentCallbacks(callback: ComponentCallbacks) {
        callbacks -= callback
    }

    companion object {
        const val ACTIVITY_SERVICE = "activity"
        const val BATTERY_SERVICE = "batterymanager"
        const val PERFORMANCE_HINT_SERVICE = "performance_hint"
        const val POWER_SERVICE = "power"
    }
}
