/* A sound played to an exported model. Prints its tokens and the answer's. */
package edge.runtime

import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.runBlocking

fun main(arguments: Array<String>): Unit = runBlocking {
    val (path, sounds, sound) = arguments
    val shorts = ByteBuffer.wrap(File(sound).readBytes()).order(ByteOrder.LITTLE_ENDIAN).asShortBuffer()
    val samples = ShortArray(shorts.remaining()).also { shorts.get(it) }
    EdgeModel.open(path).use { model ->
        println("tokens=${model.soundTokens(samples.size, 16000)}")
        val session = model.session(EdgeOptions(temperature = 0.0, maxTokens = 12, ignoreEos = true, speculate = Speculate.OFF))
        session.sound(samples, 16000, sounds)
        println("answer=${session.pieces("What is heard?").toList().map { it.token }.filter { it >= 0 }}")
        try {
            session.sound(samples, 9, sounds)
        } catch (error: EdgeException) {
            println("refused=${error.status} ${error.message}")
        }
    }
}
