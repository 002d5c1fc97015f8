package edge.runtime

/** Why a call failed; [Status.BAD_ARGUMENT] also stands for a call out of order. */
public enum class Status(internal val code: Int) {
    // generated: Status
    ;

    internal companion object {
        fun of(code: Int) = entries.firstOrNull { it.code == code } ?: FAILED
    }
}

/** The message is one line that says what was wrong and what to do. */
public class EdgeException(public val status: Status, message: String) : RuntimeException(message) {
    @Suppress("unused") // made by edge_jni.c
    private constructor(code: Int, message: ByteArray) : this(Status.of(code), named(message.decodeToString()))
}

/** C's names in messages of the library, and what they are here. */
private val NAMES = mapOf(
    // generated: Names
)

private fun named(message: String) = Regex("edge_[a-z_.]+[a-z]|EDGE_[A-Z]+").replace(message) { NAMES[it.value] ?: it.value }
