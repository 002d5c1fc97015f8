/* Pictures shown to an exported model. Prints an answer for each. */
package edge.runtime

import android.graphics.Bitmap
import java.io.File
import java.io.RandomAccessFile
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.runBlocking

fun main(arguments: Array<String>): Unit = runBlocking {
    val (path, eyes, picture, wide) = arguments
    val width = wide.toInt()
    val bytes = File(picture).readBytes()
    val colors = IntArray(bytes.size / 3) { at ->
        (0 until 3).fold(0xff) { color, part -> color shl 8 or (bytes[3 * at + part].toInt() and 0xff) }
    }
    val height = colors.size / width
    val greedy = EdgeOptions(temperature = 0.0, maxTokens = 12, ignoreEos = true, speculate = Speculate.OFF)
    EdgeModel.open(path).use { model ->
        println("tokens=${model.imageTokens(width, height)}")
        val session = model.session(greedy)
        suspend fun answer() {
            println("answer=${session.pieces("What is in the picture?").toList().map { it.token }.filter { it >= 0 }}")
            session.reset()
        }
        session.image(colors, width, height, eyes)
        answer()
        for (config in listOf(Bitmap.Config.ARGB_8888, Bitmap.Config.HARDWARE)) {
            session.image(Bitmap(width, height, config, colors), eyes)
            answer()
        }
        RandomAccessFile(eyes, "r").use { file ->
            session.image(Bitmap(width, height, Bitmap.Config.ARGB_8888, colors), descriptor(file))
        }
        answer()
        for (shown in listOf(colors.copyOf(3) to 1, colors.copyOf(250) to 1)) {
            try {
                session.image(shown.first, shown.first.size / shown.second, shown.second, eyes, tokens = if (shown.first.size < 4) 1 else 0)
            } catch (failed: EdgeException) {
                println("refused=${failed.status}: ${failed.message}")
            }
        }
        try {
            session.image(colors, width, height + 1, eyes)
        } catch (failed: IllegalArgumentException) {
            println("sizes=${failed.message}")
        }
    }
}
