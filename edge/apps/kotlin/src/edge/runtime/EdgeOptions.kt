package edge.runtime

import java.io.Closeable
import java.nio.ByteBuffer
import java.nio.ByteOrder

/** Options of a session, as `edge run` has them. */
public data class EdgeOptions(
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

    /** Sets options one by one, for Java: `new EdgeOptions.Builder().maxTokens(64).build()`. */
    public class Builder {
        private var options = EdgeOptions()

        public fun build(): EdgeOptions = options

        // generated: OptionsBuilder
    }
}

/** What computes; see [EdgeOptions.engine]. */
public enum class Engine {
    // generated: Engine
}

/** Whether drafts of repeated text are verified; see [EdgeOptions.speculate]. */
public enum class Speculate {
    // generated: Speculate
}

/** The role of a text. */
public enum class Role(internal val code: Int) {
    // generated: Role
}

/** The form of answers: any text; JSON that matches a schema; text that matches a regular expression as a whole. */
public enum class Form {
    // generated: Form
}

/** Why an answer ended, in the order of edge.h. */
public enum class Finish {
    // generated: Finish
    ;

    internal companion object {
        fun of(code: Int) = entries.getOrElse(code) { INTERRUPTED } // unknown: a reason of a later runtime
    }
}

/**
 * A part of an answer: whole characters, perhaps none. [token] is -1 for the rest of a text, and while the prompt runs. [done]:
 * tokens of the prompt that have run, of [asked].
 */
public data class Piece(
    public val text: String,
    public val token: Int,
    public val finish: Finish,
    public val done: Int = 0,
    public val asked: Int = 0,
)

/** The memory that [EdgeSession.trim] returns: unused pages; half of the rows that can be spared, too; all of them. */
public enum class Trim {
    // generated: Trim
}

/** How a sound is heard. [rate]: samples per second, from 1000 to 192000. */
public data class Hearing(
    // generated: Hearing
) {
    init {
        require(listOf(language, prompt).none { it != null && '\u0000' in it }) { "a text contains the character U+0000" }
    }

    internal fun bytes() =
        // generated: HearingBytes
}

/** A part of a transcript. */
public data class Segment(
    // generated: Segment
) {
    // generated: SegmentRead
}

/** Measurements of the app; null: unknown. */
public data class Readings(
    // generated: Readings
) {
    internal fun bytes() =
        // generated: ReadingsBytes
}

/** Read about twice a second while an answer is generated, by the thread that generates. */
public fun interface Sensors {
    public fun read(): Readings

    /**
     * A hint session for these threads of the system, whose steps should take [targetNanos]; null: the system has none.
     * The session closes it when it ends, and when other threads compute.
     */
    public fun hint(threads: IntArray, targetNanos: Long): Hint? = null
}

/** Tells the system how long steps take, so that it clocks and places threads by that. */
public interface Hint : Closeable {
    public fun target(nanos: Long)

    public fun ran(nanos: Long)
}

/** A model and its plan. */
public data class ModelInfo(
    // generated: ModelInfo
) {
    // generated: ModelInfoRead
}

/** The resources that a session uses. */
public data class Usage(
    // generated: Usage
) {
    // generated: UsageRead
}

/** A struct of edge.h in C's layout, which begins with its size. */
internal fun struct(size: Int): ByteBuffer = ByteBuffer.allocate(size).order(ByteOrder.nativeOrder()).putInt(0, size)
