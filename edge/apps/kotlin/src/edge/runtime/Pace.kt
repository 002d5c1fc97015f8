package edge.runtime

import java.io.Closeable

private const val NO_PASS_NANOS = 100_000L // a token that was verified with the last one: no pass takes less
private const val PAUSED = 4 // times the shortest step: a pause for temperature was a part of it

/** Reports steps to the system's hint session; the target is the shortest step so far, so that clocks are kept up to it. */
internal class Pace(private val sensors: Sensors) : Closeable {
    private var hint: Hint? = null
    private var threads = IntArray(0)
    private var shortest = Long.MAX_VALUE

    /** A step of one token has taken [nanos] on the threads [now]. */
    fun ran(nanos: Long, now: IntArray) {
        if (nanos < NO_PASS_NANOS || nanos / PAUSED > shortest) return
        val shorter = nanos < shortest
        if (shorter) shortest = nanos
        if (!now.contentEquals(threads)) {
            close()
            threads = now
            if (now.isNotEmpty()) hint = sensors.hint(now, shortest)
        } else if (shorter) {
            hint?.target(shortest)
        }
        hint?.ran(nanos)
    }

    override fun close() {
        hint?.close()
        hint = null
        threads = IntArray(0)
    }
}
