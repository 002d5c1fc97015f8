package edge.runtime

import java.io.ByteArrayOutputStream
import java.nio.ByteBuffer
import java.nio.ByteOrder

/**
 * The embedding of a text, of [ModelInfo.dimensions] values; the first [dimensions] if that is not 0. [prompt]: the
 * name of one of the model's, such as query or document, to stand before the text. [normalize]: scale to length 1.
 * [truncate]: leave out the end of a text that is longer than the cache. Forgets the conversation. Throws EdgeException
 * with [Status.UNSUPPORTED] if the bundle makes no embeddings, [Status.FULL] for a text that is too long.
 */
public suspend fun EdgeSession.embed(
    text: String,
    prompt: String? = null,
    dimensions: Int = 0,
    normalize: Boolean = true,
    truncate: Boolean = false,
): FloatArray = embed(listOf(text), prompt, dimensions, normalize, truncate)[0]

/** Of several texts, which takes less time than one after the other. */
public suspend fun EdgeSession.embed(
    texts: List<String>,
    prompt: String? = null,
    dimensions: Int = 0,
    normalize: Boolean = true,
    truncate: Boolean = false,
): List<FloatArray> = change { session ->
    require(dimensions >= 0) { "dimensions is $dimensions, but must not be negative" }
    require(prompt == null || '\u0000' !in prompt) { "the prompt's name contains the character U+0000" }
    val bytes = texts.map { it.encodeToByteArray() }
    val size = if (dimensions > 0) dimensions else model.info.dimensions
    val vectors = ByteBuffer.allocate(Math.multiplyExact(4 * texts.size, size)).order(ByteOrder.nativeOrder())
    Native.embed(
        session,
        ByteArrayOutputStream().apply { bytes.forEach { write(it, 0, it.size) } }.toByteArray(),
        IntArray(bytes.size) { bytes[it].size },
        prompt?.encodeToByteArray(),
        dimensions,
        if (normalize) 0 else 1,
        if (truncate) 1 else 0,
        vectors.array(),
    )
    texts.map { FloatArray(size) { vectors.float } }
}
