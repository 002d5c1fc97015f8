package edge.runtime

import kotlin.math.abs

private const val LONGEST_GAP_NANOS = 5_000_000_000L

/** Adds up the energy drawn from a battery, from readings of its current and voltage. */
internal class BatteryMeter {
    private var joules = 0.0
    private var lastNanos = 0L
    private var lastWatts: Double? = null

    /**
     * Joules since the first reading; null if this reading does not show consumption: the battery charges, or the values
     * are implausible for a working phone. Some phones report milliamperes where Android asks for
     * microamperes, others always 0, and vendors disagree on the sign. Time between readings more than 5 s apart is
     * left out.
     */
    fun add(nanos: Long, microamperes: Long, millivolts: Int, charging: Boolean): Double? {
        val watts = watts(microamperes, millivolts).takeUnless { charging }
        val before = lastWatts
        val passed = nanos - lastNanos
        lastNanos = nanos
        lastWatts = watts
        if (watts == null) return null
        if (before != null && passed in 0..LONGEST_GAP_NANOS) joules += (before + watts) / 2 * passed / 1e9
        return joules
    }

    private fun watts(microamperes: Long, millivolts: Int): Double? {
        val plausible = millivolts in 2_500..10_000 &&
            (microamperes in 10_000..10_000_000 || microamperes in -10_000_000..-10_000)
        return if (plausible) abs(microamperes) / 1e6 * (millivolts / 1e3) else null
    }
}
