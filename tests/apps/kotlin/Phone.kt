/* What Android's values become. Prints a line for each: what was seen. */
package edge.runtime

import android.app.ActivityManager
import android.content.ComponentCallbacks2
import android.content.Context
import android.content.Intent
import android.content.pm.PackageManager
import android.content.res.AssetManager
import android.os.BatteryManager
import android.os.Build
import android.os.PerformanceHintManager
import android.os.PowerManager
import java.io.IOException
import java.io.InputStream
import kotlinx.coroutines.runBlocking

private const val SECOND = 1_000_000_000L

/* Readings a second apart: current in microamperes, voltage in millivolts, plugged in; then joules. */
private fun joules(vararg readings: Triple<Long, Int, Boolean>, seconds: Long = 1): List<Double?> {
    val meter = BatteryMeter()
    return readings.mapIndexed { i, (current, voltage, charging) ->
        meter.add(i * seconds * SECOND, current, voltage, charging)
    }
}

private fun battery() {
    val one = Triple(-1_000_000L, 4000, false)
    println("steady=${joules(one, one, one)}")
    println("rising=${joules(one, Triple(-3_000_000L, 4000, false))}")
    println("sign=${joules(Triple(500_000L, 4000, false), Triple(500_000L, 4000, false))}")
    println("charging=${joules(one, Triple(1_000_000L, 4000, true), one, one)}")
    println("milliamperes=${joules(Triple(-900L, 4000, false))}")
    println("zero=${joules(Triple(0L, 4000, false))}")
    println("unknown=${joules(Triple(Long.MIN_VALUE, 4000, false), Triple(Int.MIN_VALUE.toLong(), 4000, false))}")
    println("voltage=${joules(Triple(-1_000_000L, 0, false), Triple(-1_000_000L, 4, false))}")
    println("gap=${joules(one, one, one, seconds = 60)}")
}

private fun sensors() {
    val context = Context()
    val sensors = AndroidSensors(context)
    println("nothing=${sensors.read(0)}")
    context.batteryState = Intent(mapOf("voltage" to 4000, "plugged" to 0, "temperature" to 315))
    BatteryManager.current = -500_000
    PowerManager.headroom = 0.5f
    ActivityManager.available = 200 // less than the system wants to keep
    val asked = PowerManager.asked
    val start = System.nanoTime() + 10 * SECOND
    val read = List(5) { sensors.read(start + it * SECOND / 2) }
    println("read=${read.last()}")
    println("asked=${PowerManager.asked - asked}")
    Build.VERSION.SDK_INT = 29
    println("old=${AndroidSensors(context).read(start).headroom}")
    Build.VERSION.SDK_INT = 34
}

/* What a session and Pace tell Android of steps: of the first, none, and of others their times. */
private fun hints(model: EdgeModel) {
    val told = PerformanceHintManager.told
    fun said(work: () -> Unit): List<String> {
        told.clear()
        work()
        return told.toList()
    }
    val pace = Pace(AndroidSensors(Context()))
    fun steps(vararg millis: Int, threads: IntArray = intArrayOf(1, 2)) =
        said { millis.forEach { pace.ran(it * 1_000_000L, threads) } }
    println("steps=${steps(9, 8, 0, 12, 99)}")
    println("others=${steps(9, threads = intArrayOf(3))}")
    println("none=${said { pace.close() }} ${steps(9, threads = intArrayOf())}")
    PerformanceHintManager.refuses = true
    println("refused=${steps(9, 9)}")
    PerformanceHintManager.refuses = false
    Build.VERSION.SDK_INT = 30
    println("before=${steps(9, threads = intArrayOf(4))}")
    Build.VERSION.SDK_INT = 34
    fun kinds(options: EdgeOptions, set: EdgeOptions? = null) = said {
        model.session(options, AndroidSensors(Context())).use { session ->
            runBlocking { session.answer("slow").collect { } }
            set?.let { session.set(it) }
        }
    }.map { it.substringBefore(" ") }.filter { it != "target" && it != "ran" } to told.count { it.startsWith("ran") }
    println("session=${kinds(EdgeOptions(threads = 2))} ${told.first()}")
    println("power=${kinds(EdgeOptions(threads = 2, power = 3.0))}")
    println("set=${kinds(EdgeOptions(threads = 2), EdgeOptions(power = 3.0))}")
}

private fun trims(model: EdgeModel) {
    val context = Context()
    val session = model.session()
    val trimming = session.trimInBackground(context)
    fun level(level: Int): Long { // echo.c counts 1000 for a soft trim, 2000 for half, 3000 for all
        val before = session.usage().tokens
        context.callbacks.forEach { (it as ComponentCallbacks2).onTrimMemory(level) }
        return session.usage().tokens - before
    }
    val levels = listOf(
        ComponentCallbacks2.TRIM_MEMORY_RUNNING_MODERATE, ComponentCallbacks2.TRIM_MEMORY_UI_HIDDEN,
        ComponentCallbacks2.TRIM_MEMORY_BACKGROUND, ComponentCallbacks2.TRIM_MEMORY_RUNNING_LOW,
        ComponentCallbacks2.TRIM_MEMORY_MODERATE, ComponentCallbacks2.TRIM_MEMORY_RUNNING_CRITICAL,
        ComponentCallbacks2.TRIM_MEMORY_COMPLETE,
    )
    println("trims=${levels.map { level(it) }}")
    runBlocking {
        session.answer("slow question").collect { level(ComponentCallbacks2.TRIM_MEMORY_BACKGROUND) }
    }
    println("while answering=${session.usage().tokens}")
    trimming.close()
    println("closed=${level(ComponentCallbacks2.TRIM_MEMORY_BACKGROUND)} ${context.callbacks.size}")
    session.close()
}

private class Broken : InputStream() {
    private var left = 100_000

    override fun read(): Int = if (left-- > 0) 1 else throw IOException("no space left")
}

private fun assets() {
    val context = Context()
    fun files() = context.noBackupFilesDir.resolve("edge").list()?.sorted()
    fun open(): String = try {
        EdgeModel.fromAssets(context).close()
        "opened"
    } catch (failed: IOException) {
        "${failed.message}"
    }
    println("no asset=${open()} ${files()}")
    AssetManager.files["model.edge"] = { Broken() }
    println("broken=${open()} ${files()}")
    var copies = 0
    AssetManager.files["model.edge"] = { "weights".byteInputStream().also { copies++ } }
    println("copied=${open()} ${open()} ${files()} $copies")
    PackageManager.updated = 2
    println("updated=${open()} ${files()} $copies")
    AssetManager.files["eyes.edge"] = { "rows".byteInputStream() }
    println("eyes=${java.io.File(EdgeModel.assetPath(context, "eyes.edge")).readText()} ${files()}")
}

fun main() {
    battery()
    sensors()
    EdgeModel.open("/data/model.edge").use { hints(it); trims(it) }
    assets()
}
