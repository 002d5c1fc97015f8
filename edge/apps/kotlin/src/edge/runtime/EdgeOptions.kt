package edge.runtime

import java.io.Closeable
import java.nio.ByteBuffer
import java.nio.ByteOrder

/** Options of a session, as `edge run` has them. */
data class EdgeOptions(
    // generated: Options
) {
    init {
        require(threads == null || threads > 0) { "threads is $threads, but must be at least 1" }
        require(maxTokens == null || maxTokens > 0) { "maxTokens is $maxTokens, but must be at least 1" }
        require(stop.none { '\u0000' in it }) { "a stop text contains the character U+0000, on which C texts end" }
    }

    internal fun bytes() =
        // generated: OptionsBytes

    internal fun isaBytes() = isa?.encodeToByteArray()

    internal fun cacheBytes() = cache?.encodeToByteArray()

    internal fun npuBytes() = npu?.encodeToByteArray()

    internal fun stopBytes() = Array(stop.size) { stop[it].encodeToByteArray() }
}

/** The role of a text. */
enum class Role {
    // generated: Role
}

/** The form of answers: any text; JSON that matches a schema; text that matches a regular expression as a whole. */
enum class Form {
    // generated: Form
}

/** Why an answer ended, in the order of edge.h. */
enum class Finish {
    // generated: Finish
    ;

    internal companion object {
        fun of(code: Int) = entries.getOrElse(code) { INTERRUPTED } // unknown: a reason of a later runtime
    }
}

/** A part of an answer: whole characters, perhaps none. [token] is -1 for the rest of a text. */
data class Piece(val text: String, val token: Int, val finish: Finish)

/** The memory that [EdgeSession.trim] returns: unused pages; half of the rows that can be spared, too; all of them. */
enum class Trim {
    // generated: Trim
}

/** How a sound is heard. [rate]: samples per second, from 1000 to 192000. */
data class Hearing(
    // generated: Hearing
) {
    init {
        require(listOf(language, prompt).none { it != null && '\u0000' in it }) { "a text contains the character U+0000" }
    }

    internal fun bytes() =
        // generated: HearingBytes
}

/** A part of a transcript. */
data class Segment(
    // generated: Segment
) {
    // generated: SegmentRead
}

/** Measurements of the app; null: unknown. */
data class Readings(
    // generated: Readings
) {
    internal fun bytes() =
        // generated: ReadingsBytes
}

/** Read about twice a second while an answer is generated, by the thread that generates. */
fun interface Sensors {
    fun read(): Readings

    /**
     * A hint session for these threads of the system, whose steps should take [targetNanos]; null: the system has none.
     * The session closes it when it ends, and when other threads compute.
     */
    fun hint(threads: IntArray, targetNanos: Long): Hint? = null
}

/** Tells the system how long steps take, so that it clocks and places threads by that. */
interface Hint : Closeable {
    fun target(nanos: Long)
    fun ran(nanos: Long)
}

/** A model and its plan. */
data class ModelInfo(
    // generated: ModelInfo
) {
    // generated: ModelInfoRead
}

/** The resources that a session uses. */
data class Usage(
    // generated: Usage
) {
    // generated: UsageRead
}

/** A struct of edge.h in C's layout, which begins with its size. */
internal fun struct(size: Int): ByteBuffer = ByteBuffer.allocate(size).order(ByteOrder.nativeOrder()).putInt(0, size)
