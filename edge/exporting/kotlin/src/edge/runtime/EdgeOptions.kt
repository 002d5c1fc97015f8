package edge.runtime

/**
 * Options of a session, as `edge run` has them. Null leaves a choice to the model and its bundle.
 *
 * @property threads the cores of the fastest cluster, unless given
 * @property cpuMask bit i: threads may run on CPU i; 0: on all
 * @property isa instruction set, such as "dotprod"; the best of the CPU, unless given. Read by [EdgeModel.session] only
 * @property temperature 0 is greedy
 * @property seed a new one for every answer, unless given
 * @property maxTokens of an answer
 * @property stops texts before which an answer ends: at most 16, of at most 128 bytes in UTF-8
 * @property seconds budget of an answer and the prompt before it, as are [joules], [watts], [celsius] and [headroom]:
 *   those need [Sensors], but for joules, which are estimated without
 * @property headroom Android's thermal headroom: 1 is where the system throttles
 */
data class EdgeOptions(
    val threads: Int? = null,
    val cpuMask: Long = 0,
    val isa: String? = null,
    val temperature: Double? = null,
    val topK: Int? = null,
    val topP: Double? = null,
    val minP: Double? = null,
    val repeatPenalty: Double? = null,
    val seed: Long? = null,
    val maxTokens: Int? = null,
    val ignoreEos: Boolean = false,
    val stops: List<String> = emptyList(),
    val seconds: Double? = null,
    val joules: Double? = null,
    val watts: Double? = null,
    val celsius: Double? = null,
    val headroom: Double? = null,
) {
    init {
        require(threads == null || threads > 0) { "threads is $threads, but must be at least 1" }
        require(maxTokens == null || maxTokens > 0) { "maxTokens is $maxTokens, but must be at least 1" }
        require(stops.none { '\u0000' in it }) { "a stop text contains the character U+0000, on which C texts end" }
    }

    /** In the order that edge_jni.c expects. */
    internal fun integers() = longArrayOf(
        (threads ?: 0).toLong(), cpuMask, (topK ?: -1).toLong(), if (seed == null) 0 else 1, seed ?: 0,
        (maxTokens ?: 0).toLong(), if (ignoreEos) 1 else 0,
    )

    internal fun numbers() = doubleArrayOf(
        temperature ?: -1.0, topP ?: -1.0, minP ?: -1.0, repeatPenalty ?: -1.0,
        seconds ?: 0.0, joules ?: 0.0, watts ?: 0.0, celsius ?: 0.0, headroom ?: 0.0,
    )

    internal fun isaBytes() = isa?.encodeToByteArray()

    internal fun stopBytes() = Array(stops.size) { stops[it].encodeToByteArray() }
}

/** Who speaks. */
enum class Role {
    // generated: Role
    /** Before the first turn. Its KV rows stay when others are evicted, as far as the plan has room. */
    SYSTEM,
    /** A turn. Its text never becomes a control token. */
    USER,
    /** An answer from an earlier conversation. */
    ASSISTANT,
    /** Text without the chat template, in which control tokens are recognized. */
    RAW,
    // end
}

/** Why an answer ended, in the order of edge.h. */
enum class Finish {
    // generated: Finish
    GOING, EOS, STOP, LENGTH, CAPACITY, INTERRUPTED, TIME, ENERGY, POWER, THERMAL, MEMORY
    // end
    ;

    internal companion object {
        fun of(code: Int) = entries.getOrElse(code) { INTERRUPTED } // a reason that a later runtime may add
    }
}

/** A part of an answer: whole characters, perhaps none. [token] is -1 for the rest of a text. */
data class Piece(val text: String, val token: Int, val finish: Finish)

/** How much memory [EdgeSession.trim] gives back: what costs nothing, half of what can be spared, all of it. */
enum class Trim {
    // generated: Trim
    SOFT, HALF, ALL
    // end
}

/**
 * What the app measures; null: not known.
 *
 * @property joules consumed since a fixed moment
 * @property headroom Android's thermal headroom: 1 is where the system throttles
 * @property available bytes that this process may still take
 */
data class Readings(
    val joules: Double? = null, val celsius: Double? = null, val headroom: Double? = null, val available: Long? = null,
)

/** Read about twice a second while an answer is generated, by the thread that generates. */
fun interface Sensors {
    fun read(): Readings
}

/** Bytes are planned, for one session. [isa] is the best instruction set of this CPU, [capacity] the most KV rows. */
data class ModelInfo(
    val name: String, val license: String, val policy: String, val kvDtype: String, val isa: String,
    val vocab: Int, val context: Int, val capacity: Int, val threads: Int, val chat: Boolean,
    val weights: Long, val kv: Long, val scratch: Long,
)

/**
 * What a session has used.
 *
 * @property rows of the KV cache in use, of [capacity]
 * @property weights bytes, as are [kv], [scratch] and [file], which is the mapped part of model.edge
 * @property tokens that ran since the session began; [evicted] counts rows that the policy evicted
 * @property joules of the last answer and its prompt, as are [seconds]; [measured] by [Sensors], else estimated
 */
data class Usage(
    val rows: Int, val capacity: Int, val threads: Int,
    val weights: Long, val kv: Long, val scratch: Long, val file: Long,
    val tokens: Long, val evicted: Long, val joules: Double, val seconds: Double, val measured: Boolean,
)
