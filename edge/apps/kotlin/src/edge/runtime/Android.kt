/** For Android: models in assets, bitmaps, sensors, and the system's requests for memory. */
package edge.runtime

import android.app.ActivityManager
import android.content.ComponentCallbacks2
import android.content.Context
import android.content.Intent
import android.content.IntentFilter
import android.content.res.Configuration
import android.graphics.Bitmap
import android.os.BatteryManager
import android.os.Build
import android.os.PerformanceHintManager
import android.os.PowerManager
import java.io.Closeable
import java.io.File
import java.io.IOException

private const val HEADROOM_EVERY_NANOS = 1_000_000_000L // called more often, Android returns NaN
private const val HEADROOM_AHEAD_SECONDS = 10

/** Opens a model in the app's assets. As [assetPath]. */
public fun EdgeModel.Companion.fromAssets(context: Context, name: String = "model.edge"): EdgeModel =
    open(assetPath(context, name))

/**
 * The path of a file of the bundle in the app's assets: of eyes.edge for [image], of ears.edge for [transcribe].
 *
 * Assets cannot be mapped where they are: the installer aligns them to 4 bytes, these files need 64. So the first call
 * after an installation or update copies the file, which takes a second or two. Call it off the main thread. Throws
 * IOException if there is no such asset or no space for the copy.
 */
public fun EdgeModel.Companion.assetPath(context: Context, name: String): String = installed(context, name).path

@Synchronized
private fun installed(context: Context, name: String): File {
    val folder = File(context.noBackupFilesDir, "edge")
    val updated = context.packageManager.getPackageInfo(context.packageName, 0).lastUpdateTime
    val file = File(folder, "$updated-$name")
    if (file.exists()) return file
    folder.mkdirs()
    folder.listFiles()?.forEach { if (it.name.endsWith("-$name")) it.delete() } // copies of older versions of the app
    val part = File(folder, "$name.part")
    try {
        context.assets.open(name).use { from ->
            part.outputStream().use { to ->
                from.copyTo(to)
                to.fd.sync()
            }
        }
        if (!part.renameTo(file)) throw IOException("cannot rename $part to $file")
    } finally {
        part.delete()
    }
    return file
}

/** Shows an upright picture; see [image] of its colors. */
public suspend fun EdgeSession.image(bitmap: Bitmap, eyes: String, tokens: Int = 0): Unit =
    image(colors(bitmap), bitmap.width, bitmap.height, eyes, tokens)

/** With eyes.edge as a part of an open file that begins at a multiple of 64 bytes; in assets, see [assetPath]. */
public suspend fun EdgeSession.image(
    bitmap: Bitmap,
    fd: Int,
    offset: Long = 0,
    length: Long = 0,
    tokens: Int = 0,
): Unit = image(colors(bitmap), bitmap.width, bitmap.height, tokens, null, fd, offset, length)

/** Its colors, not premultiplied. Those of a bitmap in the GPU's memory are copied first. */
private fun colors(bitmap: Bitmap): IntArray {
    val readable = if (bitmap.config == Bitmap.Config.HARDWARE) bitmap.copy(Bitmap.Config.ARGB_8888, false) else bitmap
    val colors = IntArray(Math.multiplyExact(bitmap.width, bitmap.height))
    readable.getPixels(colors, 0, bitmap.width, 0, 0, bitmap.width, bitmap.height)
    return colors
}

/**
 * Gives memory back as the system asks for it, before the next token if an answer is generated: a soft trim when the app
 * goes out of sight, which is all that Android 14 and later tell of; before, half when memory is low, and all when the
 * process would be ended next. Close the result before the session.
 */
public fun EdgeSession.trimInBackground(context: Context): Closeable {
    val callbacks = object : ComponentCallbacks2 {
        override fun onTrimMemory(level: Int) {
            try {
                trim(trimOf(level))
            } catch (_: EdgeException) {
                // the session has failed; its next call reports it
            }
        }

        override fun onConfigurationChanged(newConfig: Configuration) = Unit

        @Deprecated("Deprecated in Android")
        override fun onLowMemory() = Unit
    }
    val application = context.applicationContext
    application.registerComponentCallbacks(callbacks)
    return Closeable { application.unregisterComponentCallbacks(callbacks) }
}

/** Rows are lost for good, so that routine levels take none. */
@Suppress("DEPRECATION") // not sent from Android 14 on
private fun trimOf(level: Int): Trim = when (level) {
    ComponentCallbacks2.TRIM_MEMORY_RUNNING_LOW, ComponentCallbacks2.TRIM_MEMORY_MODERATE -> Trim.HALF
    ComponentCallbacks2.TRIM_MEMORY_RUNNING_CRITICAL, ComponentCallbacks2.TRIM_MEMORY_COMPLETE -> Trim.ALL
    else -> Trim.SOFT
}

/**
 * The phone's own readings, for a session's budgets: energy from the battery's current (null while it charges or where
 * it is implausible), the battery's temperature, thermal headroom (from Android 11 on), and memory that is available
 * before the system begins to end processes. From Android 12 on, it also opens the system's hint sessions (ADPF). Make one
 * for each session.
 */
public class AndroidSensors(context: Context) : Sensors {
    private val application = context.applicationContext
    private val battery = application.getSystemService(Context.BATTERY_SERVICE) as BatteryManager
    private val power = application.getSystemService(Context.POWER_SERVICE) as PowerManager
    private val activity = application.getSystemService(Context.ACTIVITY_SERVICE) as ActivityManager
    private val meter = BatteryMeter()
    private var headroom: Double? = null
    private var headroomNanos = System.nanoTime() - HEADROOM_EVERY_NANOS

    override fun read(): Readings = read(System.nanoTime())

    internal fun read(nanos: Long): Readings {
        val state = application.registerReceiver(null, IntentFilter(Intent.ACTION_BATTERY_CHANGED))
        val joules = meter.add(
            nanos,
            battery.getLongProperty(BatteryManager.BATTERY_PROPERTY_CURRENT_NOW),
            state?.getIntExtra(BatteryManager.EXTRA_VOLTAGE, 0) ?: 0,
            (state?.getIntExtra(BatteryManager.EXTRA_PLUGGED, 0) ?: 0) != 0,
        )
        val tenths = state?.getIntExtra(BatteryManager.EXTRA_TEMPERATURE, 0) ?: 0 // 0: not known
        val memory = ActivityManager.MemoryInfo()
        activity.getMemoryInfo(memory)
        return Readings(
            joules, if (tenths > 0) tenths / 10.0 else null, readHeadroom(nanos),
            maxOf(0, memory.availMem - memory.threshold),
        )
    }

    override fun hint(threads: IntArray, targetNanos: Long): Hint? {
        if (Build.VERSION.SDK_INT < Build.VERSION_CODES.S) return null
        val manager = application.getSystemService(Context.PERFORMANCE_HINT_SERVICE) as PerformanceHintManager?
        val session = manager?.createHintSession(threads, targetNanos) ?: return null
        return object : Hint {
            override fun target(nanos: Long) = session.updateTargetWorkDuration(nanos)
            override fun ran(nanos: Long) = session.reportActualWorkDuration(nanos)
            override fun close() = session.close()
        }
    }

    private fun readHeadroom(nanos: Long): Double? {
        if (Build.VERSION.SDK_INT >= Build.VERSION_CODES.R && nanos - headroomNanos >= HEADROOM_EVERY_NANOS) {
            headroomNanos = nanos
            headroom = power.getThermalHeadroom(HEADROOM_AHEAD_SECONDS).toDouble().takeUnless { it.isNaN() }
        }
        return headroom
    }
}
