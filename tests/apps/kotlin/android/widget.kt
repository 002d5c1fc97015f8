package android.widget

import android.content.Context
import android.view.View
import android.view.ViewGroup

open class TextView(context: Context) : View() {
    open var text: CharSequence = ""

    fun append(text: CharSequence) = Unit
}

open class Button(context: Context) : TextView(context)

open class EditText(context: Context) : TextView(context) {
    @JvmName("setEditable") // in Java, `text` of an EditText can only be set by this function
    fun setText(text: CharSequence) = Unit
}

class ScrollView(context: Context) : ViewGroup()

class LinearLayout(context: Context) : ViewGroup() {
    var orientation = 0

    class LayoutParams(width: Int, height: Int, weight: Float) : ViewGroup.LayoutParams() {
        companion object {
            const val MATCH_PARENT = -1
        }
    }

    companion object {
        const val VERTICAL = 1
    }
}
