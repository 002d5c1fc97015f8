package edge.runtime

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

/** Who speaks. */
enum class Role {
    // generated: Role
}

/** Why an answer ended, in the order of edge.h. */
enum class Finish {
    // generated: Finish
    ;

    internal companion object {
        fun of(code: Int) = entries.getOrElse(code) { INTERRUPTED } // a reason that a later runtime may add
    }
}

/** A part of an answer: whole characters, perhaps none. [token] is -1 for the rest of a text. */
data class Piece(val text: String, val token: Int, val finish: Finish)

/** How much memory [EdgeSession.trim] gives back: pages that hold nothing, half of the rows that can be spared, all. */
enum class Trim {
    // generated: Trim
}

/** What the app measures; null: not known. */
data class Readings(
    // generated: Readings
) {
    internal fun bytes() =
        // generated: ReadingsBytes
}

/** Read about twice a second while an answer is generated, by the thread that generates. */
fun interface Sensors {
    fun read(): Readings
}

/** What a model and its plan are. */
data class ModelInfo(
    // generated: ModelInfo
) {
    // generated: ModelInfoRead
}

/** What a session has used. */
data class Usage(
    // generated: Usage
) {
    // generated: UsageRead
}

/** A struct of edge.h as C lays it out, which begins with its size. */
internal fun struct(size: Int): ByteBuffer = ByteBuffer.allocate(size).order(ByteOrder.nativeOrder()).putInt(0, size)
